// SPDX-License-Identifier: Apache-2.0
// csrc/paged_attention/balance.cuh on a CPU: the lanes of a warp take turns, from one meeting to the next.
//
// Reads batches from the standard input, all numbers apart by white space: requests, programs, programs at once, splits,
// tokens of a block, query heads of a KV head, window to both sides, causal, an error of the float division in units of
// the last place; then query_start_loc and seq_lens. Writes for each batch, with numbers likewise, as many rows as there are
// programs: request, split, splits, first key, key behind the last; and as many as requests: what the merge takes for the
// number of splits, the first key that any row sees, the key behind the last.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include <cuda_runtime.h>

using std::max;
using std::min;

static struct {
  int x;
} threadIdx, blockIdx, gridDim;

namespace warp {

constexpr int kLanes = 32;

// What the lanes have said at the meeting that is on, and at the one before, which some may not have left.
struct Said {
  int value;
  const char* operation;
};
Said said[2][kLanes];
int meetings[kLanes], running, division_error;
ucontext_t lanes[kLanes], scheduler;
std::function<void(int)> program;
std::vector<char> stacks(kLanes * (1 << 16));

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

const Said* meet(const char* operation, unsigned mask, int value) {
  Said* here = said[meetings[running]++ % 2];
  here[running] = {value, operation};
  swapcontext(&lanes[running], &scheduler);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (mask != 0xffffffff || here[lane].operation != operation) {
      fail("the lanes of a warp meet at different places");
    }
  }
  return here;
}

void enter() {
  program(running);
  swapcontext(&lanes[running], &scheduler);
}

// Whatever a lane does before its next meeting, all others have come to the last one.
void run(const std::function<void(int)>& what, bool (*ended)()) {
  program = what;
  for (int lane = 0; lane < kLanes; ++lane) {
    meetings[lane] = 0;
    getcontext(&lanes[lane]);
    lanes[lane].uc_stack.ss_sp = stacks.data() + lane * (1 << 16);
    lanes[lane].uc_stack.ss_size = 1 << 16;
    makecontext(&lanes[lane], enter, 0);
  }
  do {
    for (running = 0; running < kLanes; ++running) {
      threadIdx.x = running;
      swapcontext(&scheduler, &lanes[running]);
    }
  } while (!ended());
}

template <typename Join>
int join(const char* operation, unsigned mask, int value, Join with) {
  const Said* all = meet(operation, mask, value);
  int result = all[0].value;
  for (int lane = 1; lane < kLanes; ++lane) {
    result = with(result, all[lane].value);
  }
  return result;
}

}  // namespace warp

inline int __shfl_sync(unsigned mask, int value, int from) { return warp::meet("shfl", mask, value)[from % 32].value; }
inline int __shfl_up_sync(unsigned mask, int value, int by) {
  const int lane = warp::running;
  return warp::meet("shfl_up", mask, value)[lane >= by ? lane - by : lane].value;
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
  const warp::Said* all = warp::meet("ballot", mask, value);
  unsigned result = 0;
  for (int lane = 0; lane < warp::kLanes; ++lane) {
    result |= static_cast<unsigned>(all[lane].value) << lane;
  }
  return result;
}
inline int __reduce_add_sync(unsigned mask, int value) { return warp::join("add", mask, value, std::plus<int>()); }
inline int __reduce_min_sync(unsigned mask, int value) {
  return warp::join("min", mask, value, [](int one, int other) { return std::min(one, other); });
}
inline int __reduce_max_sync(unsigned mask, int value) {
  return warp::join("max", mask, value, [](int one, int other) { return std::max(one, other); });
}
inline int __ffs(unsigned value) { return __builtin_ffs(static_cast<int>(value)); }
inline int __float2int_rz(float value) { return static_cast<int>(value); }
inline float __fdividef(float number, float by) {
  float result = number / by;
  for (int step = 0; step < std::abs(warp::division_error); ++step) {
    result = std::nextafterf(result, warp::division_error > 0 ? INFINITY : 0.0f);
  }
  return result;
}

#include "balance.cuh"

// What the host says of the kernel, from which it plans launches and refuses layers.
static_assert(paged::kMaxHeadSize == LARGEST_HEAD && paged::kAlignment == HEAD_MULTIPLE);
static_assert(paged::kSubTile == PAGE_MULTIPLE && paged::kRows == LARGEST_GROUP);
static_assert(paged::kMaxSplits == MAX_SPLITS && paged::kRows == TILE_ROWS);

namespace {

int ended_lanes;

// What a warp comes to, which has to be the same for every lane.
template <typename Result>
Result of_warp(const std::function<Result(int)>& what) {
  static_assert(sizeof(Result) % sizeof(int) == 0);
  std::vector<Result> results(warp::kLanes);
  ended_lanes = 0;
  warp::run(
      [&](int lane) {
        results[lane] = what(lane);
        ++ended_lanes;
      },
      [] { return ended_lanes == warp::kLanes; });
  for (const Result& result : results) {
    if (!std::equal(
            reinterpret_cast<const int*>(&result), reinterpret_cast<const int*>(&result + 1),
            reinterpret_cast<const int*>(&results[0]))) {
      warp::fail("the lanes of a warp come to different results");
    }
  }
  return results[0];
}

bool read(int& number) { return std::scanf("%d", &number) == 1; }

void take(int& number) {
  if (!read(number)) {
    warp::fail("a batch has too few numbers");
  }
}

}  // namespace

int main() {
  using namespace paged;
  Problem p = {};
  int causal = 0;
  while (read(p.requests)) {
    for (int* number :
         {&p.programs, &p.at_once, &p.splits, &p.most_tokens, &p.group, &p.window_left, &p.window_right, &causal,
          &warp::division_error}) {
      take(*number);
    }
    std::vector<int> starts(p.requests + 1), lengths(p.requests);
    for (std::vector<int>* numbers : {&starts, &lengths}) {
      for (int& number : *numbers) {
        take(number);
      }
    }
    p.query_start_loc = starts.data();
    p.seq_lens = lengths.data();
    p.causal = causal != 0;
    p.blocks_per_request = 1;
    p.block_tokens = kRows / p.group;
    p.most_rows = p.most_tokens * p.group;
    for (int program = 0; program < p.programs; ++program) {
      const Task task = of_warp<Task>([&](int) { return task_of(p, program); });
      Keys keys = {0, 0};
      if (task.request >= 0) {
        keys = keys_of(span_of(p, block_from(p, task.request, task.request, 0)), task.splits, task.split);
      }
      std::printf("%d %d %d %d %d\n", task.request, task.split, task.splits, keys.begin, keys.end);
    }
    const Shares shares = of_warp<Shares>([&](int) { return shares_of(p); });
    for (int request = 0; request < p.requests; ++request) {
      const Block block = block_from(p, request, request, 0);
      const Span span = block.tokens > 0 ? span_of(p, block) : Span{0, 0, 0};
      const int splits = block.tokens > 0 ? splits_of(p, span.tiles, shares.tiles) : 0;
      std::printf("%d %d %d\n", splits, span.begin, span.end);
    }
  }
  return 0;
}
