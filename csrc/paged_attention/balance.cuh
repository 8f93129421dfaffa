// SPDX-License-Identifier: Apache-2.0
// Distributes the keys of a batch over programs, if every request has one block of queries. Requests differ in length,
// and only the device knows their lengths, so each program looks at all of them: a long request gets many programs, a
// short request gets one. (FlashAttention 3 computes its splits in a separate kernel, a further launch for each layer.)
//
// All programs and the merge must compute the same distribution, so it uses only integers.

#pragma once

#include "problem.cuh"

namespace paged {

// Programs that saturate the memory's bandwidth: by measurement on an H200, four fifths of its multiprocessors.
__device__ __forceinline__ int enough(int at_once) { return max(at_once * 4 / 5, 1); }

// A try with fewer programs than one round has, for batches whose results take long in relation to their keys.
__device__ __forceinline__ int part_of_a_round(int at_once) { return at_once * 7 / 10; }

// Times to judge a number of programs, in sixteenths of a program's time for a tile.
constexpr int kTile = 16;
constexpr int kHalfTile = kTile / 2;
constexpr int kEmptyPipeline = 13;  // what a program takes longer that begins where another has ended
constexpr int kRowsOfOne = 2;       // rows of a result in one unit: 64 are written and read again like two tiles
constexpr int kMerge = kTile;

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
  const int lane = threadIdx.x % kWarp;
  int count = 0, sum = 0, longest = 1;
#pragma unroll 1
  for (int request = lane; request < p.requests; request += kWarp) {
    const int tiles = tiles_of(p, request);
    count += tiles > 0;
    sum += tiles;
    longest = max(longest, tiles);
  }
  count = __reduce_add_sync(kAllLanes, count);
  sum = __reduce_add_sync(kAllLanes, sum);
  longest = __reduce_max_sync(kAllLanes, longest);

  // Each lane tries another number of programs: as many rounds as its own number, and lane 0 a part of one, for batches
  // whose results take long in relation to their keys.
  int programs = lane > 0 ? lane * p.at_once : part_of_a_round(p.at_once), tiles = longest;
  if (programs > count && programs <= p.programs) {
    // Two bounds on the number of tiles so that the programs suffice. n requests of t tiles in all need
    // (t - n) / tiles + n at most; and no more than if each were as long as the longest, which is exact if they are.
    const int uneven = max(divide_up(sum - count, programs - count), 1);
    tiles = min(uneven, divide_up(longest, divide(programs, max(count, 1))));
    // With as many splits as there is room for the longest takes its time, and others need not end before.
    tiles = min(max(tiles, divide_up(longest, p.splits)), longest);
  }
  const bool splits = tiles < longest;
  // There may be far fewer results than programs: where each has 2 of 128 tiles, 64 of 92 have one.
  programs = splits ? min(programs, count * divide_up(longest, tiles)) : count;
  // How long that takes, added up over the programs that memory feeds. One round ends with its longest split. Of
  // several,
  // the last is half empty, and each begins with an empty pipeline. Results that are split are written and read again,
  // and the merge itself takes about as long as a tile.
  const int memory = enough(p.at_once);
  int time = programs <= p.at_once ? max(sum * kTile, tiles * kTile * memory)
                                   : sum * kTile + tiles * kHalfTile * memory + programs * kEmptyPipeline;
  time += splits ? programs * p.most_rows / kRowsOfOne + kMerge * memory : 0;
  const unsigned best = __ballot_sync(kAllLanes, time == __reduce_min_sync(kAllLanes, time));
  const int who = __ffs(best) - 1;
  return {__shfl_sync(kAllLanes, programs, who), __shfl_sync(kAllLanes, tiles, who)};
}

// The work of a program if keys are distributed; without a request it has none.
struct Task {
  int request, split, splits;
};

// By a whole warp, for the program of a number.
__device__ inline Task task_of(const Problem& p, int program) {
  const Shares shares = shares_of(p);
  if (program >= shares.programs) {
    return {-1, 0, 0};
  }
  const int lane = threadIdx.x % kWarp, lanes = min(p.requests, kWarp);
#pragma unroll 1
  for (int first = 0, before = 0; first < p.requests; first += kWarp) {
    const int request = first + lane;
    const int splits = request < p.requests ? splits_of(p, tiles_of(p, request), shares.tiles) : 0;
    int until = splits;
    for (int distance = 1; distance < lanes; distance *= 2) {
      const int other = __shfl_up_sync(kAllLanes, until, distance);
      until += lane >= distance ? other : 0;
    }
    until += before;
    const unsigned found = __ballot_sync(kAllLanes, until > program);
    if (found != 0) {
      const int who = __ffs(found) - 1, theirs = __shfl_sync(kAllLanes, splits, who);
      return {first + who, program - (__shfl_sync(kAllLanes, until, who) - theirs), theirs};
    }
    before = __shfl_sync(kAllLanes, until, kWarp - 1);
  }
  return {-1, 0, 0};
}

}  // namespace paged
