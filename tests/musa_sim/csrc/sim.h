// SPDX-License-Identifier: Apache-2.0
// A device that is host memory, under PyTorch's key PrivateUse1: what its parts know of each other.
#pragma once

#include <atomic>
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace musa_sim {

constexpr auto kMusa = c10::DeviceType::PrivateUse1;
// Pinned memory is the host's, but the device can reach it.
constexpr c10::DeviceIndex kPinned = -1;

inline bool on_musa(const at::Tensor& t) { return t.defined() && t.device().type() == kMusa; }

// -- memory

// A piece of memory of one device; it lives as long as a storage or a graph holds it.
struct Block {
  Block(void* ptr, size_t nbytes, c10::DeviceIndex device, at::Storage from);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* const ptr;
  const size_t nbytes;
  const c10::DeviceIndex device;
  // Memory that a kernel of the CPU allocated for its result.
  const at::Storage from;
};

std::shared_ptr<Block> block_at(const void* ptr);
c10::Allocator* allocator();
// The result of a kernel of the CPU as memory of a device, without a copy.
at::Storage adopt(const at::Storage& from, c10::DeviceIndex device);
// Pinned memory of the host as a tensor of the current device: the same bytes, at once on both sides.
at::Tensor mapped(const at::Tensor& pinned);
size_t total_memory();

// -- the runtime

// The GPUs that MUSA_VISIBLE_DEVICES leaves to this process, by their physical index.
const std::vector<int>& devices();
c10::DeviceIndex current_device();
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);
void set_stream(c10::Stream stream);
void synchronize(c10::DeviceIndex device);
at::Generator default_generator(c10::DeviceIndex device);
at::Generator host_generator(const at::Generator& generator);

// -- graphs

// What an event knows of the stream that it was recorded on.
struct Mark {
  double at = 0;
  uint64_t capture = 0;
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
};

// A tape. As on hardware a capture leaves memory as it was, only replays write, and a graph does not keep what was
// allocated before its capture.
class Graph {
 public:
  ~Graph();
  void capture_begin(std::pair<uint64_t, uint64_t> pool, const std::string& mode);
  void capture_end();
  void replay();
  void reset();
  std::pair<uint64_t, uint64_t> pool() const { return pool_; }
  size_t size() const { return steps_.size(); }

  // A step uses this memory. To be called before the step runs: what it may write is saved until the capture's end.
  void use(const void* ptr, bool writes);
  void add(std::function<void()> step);
  void own(std::shared_ptr<Block> block);

  // The graph that takes this stream's work, or null.
  static Graph* of(const c10::Stream& stream);
  // Events bring other streams into a capture and back.
  static Mark mark(const c10::Stream& stream);
  static void wait(const Mark& mark, const c10::Stream& stream);
  // Raise, and break the capture, where the host would wait for work that is only being recorded: on this stream, after
  // this event, or (without either) on the whole device, which the capture's mode may allow to other threads.
  static void forbid(const std::string& what, const c10::Stream& stream);
  static void forbid(const std::string& what, const Mark& mark);
  static void forbid(const std::string& what);
  static std::pair<uint64_t, uint64_t> new_pool();

 private:
  void end();
  [[noreturn]] void refuse(const std::string& what);

  bool captured_ = false;
  uint64_t id_ = 0;
  std::string mode_, broken_;
  std::pair<uint64_t, uint64_t> pool_{0, 0};
  c10::Stream origin_{c10::Stream::DEFAULT, c10::Device(c10::kCPU)};
  // Streams that an event has brought in, and whether they have come back since they last worked.
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, bool> forked_;
  std::vector<std::function<void()>> steps_;
  std::unordered_map<Block*, std::shared_ptr<Block>> owned_;
  std::unordered_map<Block*, std::weak_ptr<Block>> used_;
  std::unordered_map<Block*, std::pair<std::shared_ptr<Block>, std::string>> saved_;
};

// The graph that work on the current stream goes to, or null.
Graph* capturing();

// Groups of several members, each of which has a watchdog.
extern std::atomic<int> g_watchdogs;

// -- the CPU's kernels

// The tensors of one call, as tensors of the CPU over the same memory.
class HostViews {
 public:
  at::Tensor of(const at::Tensor& tensor);
  // The device's tensor for a result of the CPU's kernel: an argument, a view of one, or something new.
  at::Tensor back(const at::Tensor& result, c10::Device device) const;
  bool is_view(const at::Tensor& result) const;
  // Whether a kernel has made an argument larger (`out=`); the device's tensor follows.
  void follow_sizes();

 private:
  struct Seen {
    at::Tensor tensor, view;
    void* ptr;
  };
  std::vector<Seen> seen_;
  std::map<c10::StorageImpl*, at::Storage> storages_;
};

}  // namespace musa_sim
