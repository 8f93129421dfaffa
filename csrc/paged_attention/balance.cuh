// SPDX-License-Identifier: Apache-2.0
// How the keys of a batch are shared out, where every request has one block of queries. Requests differ in length, and
// only the device knows them, so each program looks at all of them: a long request gets many programs, a short one one.
// (FlashAttention 3 works out its splits in a kernel of its own; here that would be a launch more for each layer.)
//
// All programs and the merge have to come to the same shares, so everything is in whole numbers.

#pragma once

#include "problem.cuh"

namespace paged {

constexpr unsigned kWarp = 0xffffffff;

// Programs that together read as fast as memory gives: by measurement on an H200, a part of its multiprocessors.
__device__ __forceinline__ int enough(int at_once) { return max(at_once * 4 / 5, 1); }

// Tiles of a request; one that has queries has at least one, which writes their result.
__device__ inline int tiles_of(const Problem& p, int request) {
  const Block block = block_from(p, request, request, 0);
  // Not only where there are tokens: its length would be asked for when these have come.
  const int tiles = max(span_of(p, block).tiles, 1);
  return block.tokens > 0 ? tiles : 0;
}

// Programs behind that number have nothing to do, and no split has more tiles than that.
struct Shares {
  int programs, tiles;
};

// By a whole warp.
__device__ inline Shares shares_of(const Problem& p) {
  const int lane = threadIdx.x % 32;
  int count = 0, sum = 0, longest = 1;
#pragma unroll 1
  for (int request = lane; request < p.requests; request += 32) {
    const int tiles = tiles_of(p, request);
    count += tiles > 0;
    sum += tiles;
    longest = max(longest, tiles);
  }
  count = __reduce_add_sync(kWarp, count);
  sum = __reduce_add_sync(kWarp, sum);
  longest = __reduce_max_sync(kWarp, longest);

  // Each lane tries another number of programs: as many rounds as its own number, and lane 0 a part of one, for batches
  // whose results take long beside their keys.
  int programs = lane > 0 ? lane * p.at_once : p.at_once * 7 / 10, tiles = longest;
  if (programs > count && programs <= p.programs) {
    // Two bounds that a number of tiles has to keep for the programs to suffice. n requests of t tiles in all need
    // (t - n) / tiles + n at most; and no more than if each were as long as the longest, which is exact if they are.
    const int uneven = max(divide_up(sum - count, programs - count), 1);
    tiles = min(uneven, divide_up(longest, divide(programs, max(count, 1))));
    // With as many splits as there is room for the longest takes its time, and others need not end before.
    tiles = min(max(tiles, divide_up(longest, p.splits)), longest);
  }
  const bool splits = tiles < longest;
  programs = splits ? programs : count;
  // How long that takes, in sixteenths of a tile for each of the programs that memory feeds. One round ends with its
  // longest split. Of several, the last is half empty, and each begins with an empty pipeline. The result of 64 rows is
  // written and read again, as many bytes as two tiles have; the merge itself takes about as long as one.
  const int memory = enough(p.at_once);
  int time = programs <= p.at_once ? max(sum * 16, tiles * 16 * memory) : sum * 16 + tiles * 8 * memory + programs * 13;
  time += splits ? programs * p.most_rows / 2 + 16 * memory : 0;
  const unsigned best = __ballot_sync(kWarp, time == __reduce_min_sync(kWarp, time));
  const int who = __ffs(best) - 1;
  return {__shfl_sync(kWarp, programs, who), __shfl_sync(kWarp, tiles, who)};
}

// What a program of a launch has to do where keys are shared out; of no request: nothing.
struct Task {
  int request, split, splits;
};

// By a whole warp, for the program of a number.
__device__ inline Task task_of(const Problem& p, int program) {
  const Shares shares = shares_of(p);
  if (program >= shares.programs) {
    return {-1, 0, 0};
  }
  const int lane = threadIdx.x % 32, lanes = min(p.requests, 32);
#pragma unroll 1
  for (int first = 0, before = 0; first < p.requests; first += 32) {
    const int request = first + lane;
    const int splits = request < p.requests ? splits_of(p, tiles_of(p, request), shares.tiles) : 0;
    int until = splits;
    for (int distance = 1; distance < lanes; distance *= 2) {
      const int other = __shfl_up_sync(kWarp, until, distance);
      until += lane >= distance ? other : 0;
    }
    until += before;
    const unsigned found = __ballot_sync(kWarp, until > program);
    if (found != 0) {
      const int who = __ffs(found) - 1, theirs = __shfl_sync(kWarp, splits, who);
      return {first + who, program - (__shfl_sync(kWarp, until, who) - theirs), theirs};
    }
    before = __shfl_sync(kWarp, until, 31);
  }
  return {-1, 0, 0};
}

}  // namespace paged
