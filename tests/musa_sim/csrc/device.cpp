// SPDX-License-Identifier: Apache-2.0
// Memory with statistics, pinned memory, generators, and a guard with streams and events. Everything is done at once:
// a stream never has work left, and an event is always over.

#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>

namespace musa_sim {
namespace {

constexpr size_t kAlignment = 512, kSegment = 2 << 20;

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

// -- memory

struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, std::weak_ptr<Block>> blocks;
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats;
};

// Never destroyed: storages are freed until the very end of the process.
Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

c10::CachingDeviceAllocator::DeviceStats& stats_of(c10::DeviceIndex device) {
  auto& stats = registry().stats;
  if (stats.size() < devices().size()) stats.resize(devices().size());
  return stats.at(device);
}

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

void count(c10::DeviceIndex device, size_t nbytes, bool more) {
  auto& stats = stats_of(device);
  for (auto* stat : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes})
    more ? (*stat)[kAll].increase(nbytes) : (*stat)[kAll].decrease(nbytes);
  for (auto* stat : {&stats.allocation, &stats.active})
    more ? (*stat)[kAll].increase(1) : (*stat)[kAll].decrease(1);
  // A caching allocator: what is freed stays reserved until the cache is emptied.
  auto& reserved = stats.reserved_bytes[kAll];
  const auto missing = stats.allocated_bytes[kAll].current - reserved.current;
  if (missing > 0) {
    const auto segments = (missing + kSegment - 1) / kSegment;
    reserved.increase(segments * kSegment);
    stats.segment[kAll].increase(segments);
    ++stats.num_device_alloc;
  }
}

}  // namespace

Block::Block(void* ptr, size_t nbytes, c10::DeviceIndex device, at::Storage from)
    : ptr(ptr), nbytes(nbytes), device(device), from(std::move(from)) {}

Block::~Block() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto found = registry().blocks.find(reinterpret_cast<uintptr_t>(ptr));
  // Adopted memory may have been another block before, which is freed later.
  if (found != registry().blocks.end() && found->second.expired()) registry().blocks.erase(found);
  if (device != kPinned) count(device, nbytes, false);
  if (!from) std::free(ptr);
}

std::shared_ptr<Block> block_at(const void* ptr) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto address = reinterpret_cast<uintptr_t>(ptr);
  auto found = registry().blocks.upper_bound(address);
  if (found == registry().blocks.begin()) return nullptr;
  auto block = (--found)->second.lock();
  return block && address < reinterpret_cast<uintptr_t>(block->ptr) + block->nbytes ? block : nullptr;
}

size_t total_memory() { return std::stoull(variable("MUSA_SIM_MEMORY", "4294967296")); }

namespace {

using Held = std::shared_ptr<Block>;

c10::DataPtr hold(void* ptr, size_t nbytes, c10::DeviceIndex device, at::Storage from) {
  auto block = std::make_shared<Block>(ptr, nbytes, device, std::move(from));
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (device != kPinned) count(device, nbytes, true);
    registry().blocks[reinterpret_cast<uintptr_t>(ptr)] = block;
  }
  if (device != kPinned)
    if (auto* graph = capturing()) graph->own(block);
  const auto on = device == kPinned ? c10::Device(c10::kCPU) : c10::Device(kMusa, device);
  return {ptr, new Held(std::move(block)), [](void* held) { delete static_cast<Held*>(held); }, on};
}

void* aligned(size_t nbytes) {
  void* ptr = nullptr;
  TORCH_CHECK(posix_memalign(&ptr, kAlignment, nbytes) == 0, "the host has no ", nbytes, " bytes left");
  return ptr;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const auto device = current_device();
    if (nbytes == 0) return {nullptr, c10::Device(kMusa, device)};
    const auto free = getMemoryInfo(device).first + cached(device);
    if (nbytes > free) {
      std::lock_guard<std::mutex> lock(registry().mutex);
      ++stats_of(device).num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "MUSA out of memory. Tried to allocate ", nbytes, " bytes on GPU ",
                       static_cast<int>(device), ", which has ", free, " of ", total_memory(), " bytes left");
    }
    return hold(aligned(nbytes), nbytes, device, {});
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(registry().mutex);
    for (size_t device = 0; device < devices().size(); ++device) {
      auto& stats = stats_of(device);
      const auto kept = (stats.allocated_bytes[kAll].current + kSegment - 1) / kSegment;
      stats.reserved_bytes[kAll].decrease(stats.reserved_bytes[kAll].current - kept * kSegment);
      stats.segment[kAll].decrease(stats.segment[kAll].current - kept);
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(registry().mutex);
    return stats_of(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const size_t reserved = stats_of(device).reserved_bytes[kAll].current;
    return {total_memory() - std::min(reserved, total_memory()), total_memory()};
  }

 private:
  static size_t cached(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto& stats = stats_of(device);
    return stats.reserved_bytes[kAll].current - stats.allocated_bytes[kAll].current;
  }
  template <typename F>
  static void each(c10::DeviceIndex device, F reset) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto& stats = stats_of(device);
    for (auto* stat : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes,
                       &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      reset((*stat)[kAll]);
  }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    return nbytes == 0 ? c10::DataPtr(nullptr, c10::Device(c10::kCPU)) : hold(aligned(nbytes), nbytes, kPinned, {});
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory& device_memory() {
  static auto* made = new DeviceMemory;
  return *made;
}

PinnedMemory& pinned_memory() {
  static auto* made = new PinnedMemory;
  return *made;
}

}  // namespace

c10::Allocator* allocator() { return &device_memory(); }

at::Storage adopt(const at::Storage& from, c10::DeviceIndex device) {
  const auto nbytes = from.nbytes();
  auto data = nbytes == 0 ? c10::DataPtr(nullptr, c10::Device(kMusa, device))
                          : hold(const_cast<void*>(from.data()), nbytes, device, from);
  return {at::Storage::use_byte_size_t(), nbytes, std::move(data), &device_memory(), true};
}

at::Tensor mapped(const at::Tensor& pinned) {
  TORCH_CHECK(pinned.is_cpu() && pinned.is_pinned(), "only pinned memory of the host has an address on the device");
  const auto& host = pinned.storage();
  const c10::Device device(kMusa, current_device());
  // It keeps the host's memory, and is none of the device's: nothing is counted, and a capture does not own it.
  c10::DataPtr data(host.mutable_data(), new at::Storage(host),
                    [](void* held) { delete static_cast<at::Storage*>(held); }, device);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      at::Storage(at::Storage::use_byte_size_t(), host.nbytes(), std::move(data), nullptr, false),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), pinned.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(pinned.sizes(), pinned.strides(), pinned.storage_offset());
  return made;
}

// -- the runtime

const std::vector<int>& devices() {
  static const auto* made = [] {
    auto* found = new std::vector<int>;
    const int installed = std::stoi(variable("MUSA_SIM_DEVICES", "1"));
    const char* visible = std::getenv("MUSA_VISIBLE_DEVICES");
    std::istringstream ids(visible ? visible : "");
    std::string id;
    // As the vendor's runtime: an id that is not there ends the list.
    while (visible && std::getline(ids, id, ',')) {
      if (id.empty() || id.find_first_not_of("0123456789") != std::string::npos || std::stoi(id) >= installed) break;
      found->push_back(std::stoi(id));
    }
    for (int index = 0; !visible && index < installed; ++index) found->push_back(index);
    return found;
  }();
  return *made;
}

namespace {

thread_local c10::DeviceIndex t_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> t_streams;

void check(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && static_cast<size_t>(device) < devices().size(), "invalid device ordinal ",
              static_cast<int>(device), ": this process sees ", devices().size(), " MUSA devices");
  static const pid_t first = getpid();
  TORCH_CHECK(first == getpid(), "Cannot re-initialize MUSA in forked subprocess. To use MUSA with "
                                 "multiprocessing, you must use the 'spawn' start method");
}

c10::DeviceIndex set_device(c10::DeviceIndex device) {
  check(device);
  return std::exchange(t_device, device);
}

// A generator of the CPU under the device's name. On a GPU a draw of few numbers takes an offset of four, and vLLM goes
// back by that: from the last draw on.
struct MusaGenerator final : c10::GeneratorImpl {
  MusaGenerator(c10::DeviceIndex device, at::Generator host)
      : c10::GeneratorImpl(c10::Device(kMusa, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}
  static c10::DeviceType device_type() { return kMusa; }
  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
    before = at::Tensor();
    offset = 0;
  }
  void set_offset(uint64_t wanted) override {
    if (wanted == offset) return;
    TORCH_CHECK(before.defined() && wanted + kDraw == offset, "this generator goes back by its last draw only");
    host.set_state(std::exchange(before, at::Tensor()));
    offset = wanted;
  }
  uint64_t get_offset() const override { return offset; }
  const at::Generator& draw() {
    before = host.get_state();
    offset += kDraw;
    return host;
  }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new MusaGenerator(device().index(), host.clone()); }
  static constexpr uint64_t kDraw = 4;
  at::Generator host;
  at::Tensor before;
  uint64_t offset = 0;
};

at::Generator new_generator(c10::DeviceIndex device) {
  const auto index = device < 0 ? current_device() : device;
  return at::make_generator<MusaGenerator>(index, at::detail::createCPUGenerator());
}

const at::Generator& generator_of(c10::DeviceIndex device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (size_t index = 0; index < devices().size(); ++index) all->push_back(new_generator(index));
    return all;
  }();
  return made->at(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !devices().empty(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return devices().size(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return set_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return set_device(device); }
  bool isPinnedPtr(const void* ptr) const override {
    const auto block = block_at(ptr);
    return block && block->device == kPinned;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Device getDeviceFromPtr(void* ptr) const override {
    const auto block = block_at(ptr);
    TORCH_CHECK(block && block->device != kPinned, "the pointer is not to memory of a MUSA device");
    return {kMusa, block->device};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return generator_of(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    const c10::OptionalDeviceGuard guard(storage.device());
    auto data = device_memory().allocate(nbytes);
    if (const auto kept = std::min(nbytes, storage.nbytes())) std::memcpy(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(nbytes);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kMusa; }
  c10::Device exchangeDevice(c10::Device d) const override { return {kMusa, set_device(d.index())}; }
  c10::Device getDevice() const override { return {kMusa, current_device()}; }
  void setDevice(c10::Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { t_device = d.index(); }
  c10::Stream getStream(c10::Device d) const override {
    return current_stream(d.index() < 0 ? current_device() : d.index());
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kMusa, d.index() < 0 ? current_device() : d.index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return new_stream(d.index()); }
  c10::Stream getNewStream(c10::Device d, int) const override { return new_stream(d.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    set_stream(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Mark;
    *static_cast<Mark*>(*event) = Graph::mark(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Graph::wait(*static_cast<Mark*>(event), stream);
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr) Graph::forbid("Event.query()", *static_cast<Mark*>(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Graph::forbid("Event.synchronize()", *static_cast<Mark*>(event));
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return (static_cast<Mark*>(to)->at - static_cast<Mark*>(from)->at) * 1000;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return devices().size(); }
  bool queryStream(const c10::Stream& stream) const override {
    Graph::forbid("Stream.query()", stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Graph::forbid("Stream.synchronize()", stream);
  }
  bool isStreamCapturing(const c10::Stream& stream) const { return Graph::of(stream) != nullptr; }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize(device); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory())
REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, &pinned_memory())
const bool hooks_are_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

c10::DeviceIndex current_device() {
  check(t_device);
  return t_device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kMusa, device), t_streams[device]);
}

c10::Stream new_stream(c10::DeviceIndex device) {
  static std::atomic<c10::StreamId> last{0};
  const auto index = device < 0 ? current_device() : device;
  check(index);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kMusa, index), ++last);
}

void set_stream(c10::Stream stream) { t_streams[stream.device_index()] = stream.id(); }

void synchronize(c10::DeviceIndex device) {
  check(device < 0 ? current_device() : device);
  Graph::forbid("torch.musa.synchronize()");
}

at::Generator default_generator(c10::DeviceIndex device) { return generator_of(device); }

at::Generator host_generator(const at::Generator& generator) {
  return generator.device().type() == kMusa ? generator.get<MusaGenerator>()->draw() : generator;
}

}  // namespace musa_sim
