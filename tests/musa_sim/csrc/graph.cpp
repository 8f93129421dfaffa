// SPDX-License-Identifier: Apache-2.0
// Graphs as tapes, as strict as a driver: what it would refuse raises, and breaks the capture.

#include "sim.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

namespace musa_sim {
namespace {

std::recursive_mutex g_mutex;
// Captures under way, with the thread that began each.
std::map<Graph*, std::thread::id> g_captures;
std::atomic<uint64_t> g_ids{0}, g_pools{0};

// What a capture leaves in memory that only its graph fills: NaN in every floating-point type.
constexpr int kUnwritten = 0xFF;

// Graphs that the process holds ready.
std::atomic<int> g_ready{0};

// And at most, as torchada 0.1.103 found on an MTT S5000, unless a test says fewer.
int most_ready() {
  const char* fewer = std::getenv("MUSA_SIM_GRAPHS");
  return fewer ? std::atoi(fewer) : 2043;
}

// The generators' seed and offset: the first capture makes tensors for them, and every capture and replay writes to these.
void write_generators() {
  static const bool made_in_inference = c10::InferenceMode::is_enabled();
  TORCH_CHECK(!made_in_inference || c10::InferenceMode::is_enabled(),
              "Inplace update to inference tensor outside InferenceMode is not allowed.");
}

using Lock = std::lock_guard<std::recursive_mutex>;

std::pair<c10::DeviceIndex, c10::StreamId> key(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

}  // namespace

Graph* Graph::of(const c10::Stream& stream) {
  const Lock lock(g_mutex);
  for (auto& [graph, thread] : g_captures)
    if (graph->origin_ == stream || graph->forked_.count(key(stream))) return graph;
  return nullptr;
}

Graph* capturing() {
  {
    const Lock lock(g_mutex);
    if (g_captures.empty()) return nullptr;
  }
  return Graph::of(current_stream(current_device()));
}

// -- streams and events

Mark Graph::mark(const c10::Stream& stream) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  auto* graph = of(stream);
  return {std::chrono::duration<double>(now).count(), graph ? graph->id_ : 0, stream.device_index(), stream.id()};
}

void Graph::wait(const Mark& mark, const c10::Stream& stream) {
  const Lock lock(g_mutex);
  for (auto& [graph, thread] : g_captures) {
    if (graph->id_ != mark.capture) continue;
    if (graph->origin_ != stream) graph->forked_.emplace(key(stream), false);
    const auto from = graph->forked_.find({mark.device, mark.stream});
    if (from != graph->forked_.end() && from->first != key(stream)) from->second = true;
  }
}

void Graph::forbid(const std::string& what, const c10::Stream& stream) {
  if (auto* graph = of(stream)) graph->refuse(what);
}

void Graph::forbid(const std::string& what, const Mark& mark) {
  const Lock lock(g_mutex);
  for (auto& [graph, thread] : g_captures)
    if (graph->id_ == mark.capture) graph->refuse(what);
}

void Graph::forbid(const std::string& what) {
  const Lock lock(g_mutex);
  for (auto& [graph, thread] : g_captures)
    if (graph->mode_ == "global" || (graph->mode_ == "thread_local" && thread == std::this_thread::get_id()))
      graph->refuse(what);
  forbid(what, current_stream(current_device()));
}

void Graph::refuse(const std::string& what) {
  if (broken_.empty()) broken_ = what;
  TORCH_CHECK(false, "MUSA error: operation not permitted when stream is capturing: ", what);
}

// -- capture

std::pair<uint64_t, uint64_t> Graph::new_pool() { return {0, ++g_pools}; }

void Graph::capture_begin(std::pair<uint64_t, uint64_t> pool, const std::string& mode) {
  TORCH_CHECK(mode == "global" || mode == "thread_local" || mode == "relaxed",
              "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got ", mode);
  TORCH_CHECK(!captured_, "This MUSAGraph instance already owns a captured graph. To capture a new graph, create a "
                          "new instance.");
  const auto stream = current_stream(current_device());
  TORCH_CHECK(stream.id() != 0, "MUSA graphs must be captured on a non-default stream.");
  TORCH_CHECK(of(stream) == nullptr, "MUSA error: the stream is capturing already");
  write_generators();
  const Lock lock(g_mutex);
  id_ = ++g_ids;
  origin_ = stream;
  mode_ = mode;
  pool_ = pool.first || pool.second ? pool : std::pair<uint64_t, uint64_t>{id_, 0};
  g_captures.emplace(this, std::this_thread::get_id());
  // At some time in it, in a thread of its own.
  if (mode == "global" && g_watchdogs > 0) broken_ = "the query of an event, by MCCL's watchdog";
}

void Graph::end() {
  const Lock lock(g_mutex);
  g_captures.erase(this);
  for (auto& [block, save] : saved_) std::memcpy(save.first->ptr, save.second.data(), save.second.size());
  saved_.clear();
  forked_.clear();
}

void Graph::capture_end() {
  {
    const Lock lock(g_mutex);
    TORCH_CHECK(g_captures.count(this), "MUSA error: capture_end() of a graph that is not being captured");
    TORCH_CHECK(origin_ == current_stream(current_device()), "Capture must end on the same stream it began on.");
    for (auto& [stream, back] : forked_)
      if (!back && broken_.empty()) broken_ = "capturing stream has unjoined work";
    end();
  }
  captured_ = true;
  if (++g_ready > most_ready() && broken_.empty()) broken_ = "an illegal memory access was encountered";
  if (!broken_.empty()) {
    const auto why = broken_;
    reset();
    TORCH_CHECK(false,
                     "MUSA error: operation failed due to a previous error during capture: ", why);
  }
  for (auto& [block, held] : owned_) std::memset(block->ptr, kUnwritten, block->nbytes);
}

void Graph::own(std::shared_ptr<Block> block) { owned_.emplace(block.get(), std::move(block)); }

void Graph::use(const void* ptr, bool writes) {
  auto block = block_at(ptr);
  if (!block || owned_.count(block.get())) return;
  used_.emplace(block.get(), block);
  if (writes && !saved_.count(block.get()))
    saved_.emplace(block.get(), std::make_pair(block, std::string(static_cast<char*>(block->ptr), block->nbytes)));
}

void Graph::add(std::function<void()> step) {
  const Lock lock(g_mutex);
  steps_.push_back(std::move(step));
  const auto here = forked_.find(key(current_stream(current_device())));
  if (here != forked_.end()) here->second = false;
}

// -- replay

void Graph::replay() {
  TORCH_CHECK(captured_, "Called MUSAGraph::replay without a preceding successful capture.");
  forbid("MUSAGraph.replay()", current_stream(current_device()));
  write_generators();
  for (auto& [address, block] : used_)
    TORCH_CHECK(!block.expired(),
                     "MUSA error: an illegal memory access was encountered: the graph uses memory that was allocated "
                     "before its capture and has been freed since");
  for (auto& step : steps_) step();
}

void Graph::reset() {
  steps_.clear();
  owned_.clear();
  used_.clear();
  if (captured_) --g_ready;
  captured_ = false;
  broken_.clear();
}

Graph::~Graph() {
  end();
  if (captured_) --g_ready;
}

}  // namespace musa_sim
