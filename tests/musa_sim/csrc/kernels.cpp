// SPDX-License-Identifier: Apache-2.0
// Every operation by the CPU's kernel, on the same memory; and the few that have to know of the device.

#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_set>

namespace musa_sim {

// -- the same memory under the CPU's name

at::Tensor HostViews::of(const at::Tensor& tensor) {
  for (auto& seen : seen_)
    if (seen.tensor.is_same(tensor)) return seen.view;
  const auto& storage = tensor.storage();
  auto& host = storages_[storage.unsafeGetStorageImpl()];
  if (!host)
    host = at::Storage(at::Storage::use_byte_size_t(), storage.nbytes(),
                       c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)), c10::GetCPUAllocator(),
                       true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(at::Storage(host), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  seen_.push_back({tensor, view, host.mutable_data()});
  return view;
}

namespace {

at::Tensor over(at::Storage storage, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

}  // namespace

bool HostViews::is_view(const at::Tensor& result) const {
  for (auto& seen : seen_)
    if (seen.view.storage().is_alias_of(result.storage())) return true;
  return false;
}

at::Tensor HostViews::back(const at::Tensor& result, c10::Device device) const {
  if (!result.defined()) return result;
  for (auto& seen : seen_)
    if (seen.view.is_same(result)) return seen.tensor;
  for (auto& seen : seen_)
    if (seen.view.storage().is_alias_of(result.storage())) return over(seen.tensor.storage(), result);
  return over(adopt(result.storage(), device.index()), result);
}

void HostViews::follow_sizes() {
  for (auto& seen : seen_) {
    const auto& storage = seen.view.storage();
    if (storage.data() != seen.ptr) {
      at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(seen.tensor.storage(), storage.nbytes());
      std::memcpy(seen.tensor.storage().mutable_data(), storage.data(), storage.nbytes());
    }
    if (seen.view.sizes() != seen.tensor.sizes() || seen.view.strides() != seen.tensor.strides())
      seen.tensor.unsafeGetTensorImpl()->set_sizes_and_strides(seen.view.sizes(), seen.view.strides(),
                                                               seen.view.storage_offset());
  }
}

namespace {

using Stack = torch::jit::Stack;

template <typename F>
void each_tensor(const c10::IValue& value, F visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, visit);
  }
}

c10::IValue on_host(const c10::IValue& value, HostViews& views, bool constants) {
  const auto one = [&](const at::Tensor& tensor) {
    if (on_musa(tensor)) return views.of(tensor);
    // A launch takes a number from the host when it is recorded.
    return constants && tensor.defined() && tensor.dim() == 0 ? tensor.clone() : tensor;
  };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(one(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const c10::IValue& item : value.toListRef())
      made.push_back(item.isNone() ? std::nullopt : std::optional<at::Tensor>(one(item.toTensor())));
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kMusa) return c10::Device(c10::kCPU);
  if (value.isGenerator()) return host_generator(value.toGenerator());
  return value;
}

bool takes_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

bool writes_to(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

std::vector<c10::IValue> arguments_on_host(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                                           HostViews& views, c10::Device device, bool constants) {
  std::vector<c10::IValue> made;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool default_generator_meant = arguments[i].isNone() && takes_generator(op.schema().arguments()[i]);
    made.push_back(default_generator_meant ? c10::IValue(host_generator(default_generator(device.index())))
                                           : on_host(arguments[i], views, constants));
  }
  return made;
}

Stack run(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  Stack stack(arguments);
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack;
}

bool takes_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::index_put" ||
         name == "aten::_index_put_impl_" || name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
}

// What PyTorch's own kernels for a device refuse, and the CPU's, which see one kind of memory, would not.
c10::Device device_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  std::optional<c10::Device> device;
  bool host = false;
  for (auto& argument : arguments) {
    if (argument.isDevice() && argument.toDevice().type() == kMusa && !device) device = argument.toDevice();
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!on_musa(tensor)) {
        host |= tensor.device().is_cpu() && tensor.dim() > 0;
        return;
      }
      TORCH_CHECK(!device || *device == tensor.device() || tensor.dim() == 0, op.operator_name(),
                  ": Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                  tensor.device(), "!");
      if (!device) device = tensor.device();
    });
  }
  const auto& name = op.operator_name().name;
  TORCH_CHECK(!host || !device || name.rfind("aten::", 0) != 0 || (takes_indices(name) && on_musa(arguments[0].toTensor())),
              op.operator_name(), ": Expected all tensors to be on the same device, but found at least two devices, ",
              *device, " and cpu!");
  return device && device->has_index() ? *device : c10::Device(kMusa, current_device());
}

// Operations whose result has a size, or is a value, that the host has to wait for.
bool waits_for_device(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  const auto& name = op.operator_name().name;
  if (!takes_indices(name)) {
    return (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) &&
           !(name == "aten::repeat_interleave" && !arguments.back().isNone());
  }
  bool from_host = false, mask = false;
  each_tensor(arguments[1], [&](const at::Tensor& index) {
    from_host |= index.device().is_cpu();
    mask |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
  });
  // A number that is put where a mask is set is a masked_fill, in torch for MUSA as for CUDA. This torch has put it on
  // the device already.
  const bool fill = mask && arguments.size() > 2 && arguments[2].isTensor() && arguments[2].toTensor().numel() == 1;
  return from_host || (mask && !fill);
}

void use_all(Graph& graph, const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i)
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      graph.use(tensor.storage().data(), writes_to(op.schema().arguments()[i]));
    });
}

void results_to(const Stack& results, const std::vector<at::Tensor>& targets) {
  size_t next = 0;
  for (auto& result : results)
    each_tensor(result, [&](const at::Tensor& tensor) {
      auto target = targets[next++];
      if (target.defined()) target.copy_(tensor);
    });
}

// The operations of ATen that torch_musa has.
std::unordered_set<std::string> g_operations;

void know(const std::vector<std::string>& names) {
  for (auto& name : names) g_operations.insert("aten::" + name);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto count = op.schema().arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - count, stack->end());
  const auto device = device_of(op, arguments);
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "Could not run '",
                              op.operator_name(), "' with arguments from the 'musa' backend: neither a kernel of its "
                              "own nor one of the CPU is registered");
  const auto name = c10::toString(op.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(name.rfind("aten::", 0) != 0 || g_operations.count(name), "Could not run '", name,
                              "' with arguments from the 'musa' backend: torch_musa has no such operation");
  TORCH_CHECK_NOT_IMPLEMENTED(name.rfind("aten::sort", 0) != 0 || arguments[0].toTensor().scalar_type() != at::kBool,
                              "Could not run '", name, "' with a mask: torch_musa's own tests sort none, and vllm-musa "
                              "sorts numbers");
  auto* graph = capturing();
  if (graph != nullptr) {
    if (waits_for_device(op, arguments)) Graph::forbid(name);
    use_all(*graph, op, arguments);
  }
  const c10::DeviceGuard guard(device);
  HostViews views;
  auto results = run(op, arguments_on_host(op, arguments, views, device, false));
  views.follow_sizes();

  // For the tape: where the results of a replay go, undefined where they are an argument's memory.
  std::vector<at::Tensor> targets;
  HostViews target_views;
  const auto back = [&](const at::Tensor& result) {
    auto made = views.back(result, device);
    if (graph != nullptr && made.defined())
      targets.push_back(views.is_view(result) ? at::Tensor() : target_views.of(made));
    return made;
  };
  torch::jit::drop(*stack, count);
  for (auto& result : results) {
    if (result.isTensor()) {
      stack->emplace_back(back(result.toTensor()));
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& tensor : result.toTensorVector()) made.push_back(back(tensor));
      stack->emplace_back(made);
    } else {
      stack->push_back(result);
    }
  }
  if (graph != nullptr) {
    HostViews recorded;
    graph->add([op, targets, arguments = arguments_on_host(op, arguments, recorded, device, true)] {
      results_to(run(op, arguments), targets);
    });
  }
}

// -- factories and views

c10::Device named(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kMusa, current_device());
}

void refuse_pinned(std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> format) {
  refuse_pinned(pin_memory);
  const c10::DeviceGuard guard(named(device));
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin_memory) {
  refuse_pinned(pin_memory);
  const c10::DeviceGuard guard(named(device));
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void hold_bytes(const at::Tensor& tensor) {
  const auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(),
                                                       tensor.storage_offset());
  if (needed > tensor.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  hold_bytes(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(), "\".");
  at::native::checkSetStorage(self, source, offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() != nullptr)
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  else
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  hold_bytes(self);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t count = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return self.is_same(source)
             ? self
             : set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage(self, adopt(at::empty({0}).storage(), self.device().index()), 0, {0}, {});
}

// -- copies and values

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto* graph = capturing();
  if (graph != nullptr) {
    for (auto* side : {&source, &target})
      if (!on_musa(*side) && !(non_blocking && side->is_pinned()))
        Graph::forbid("a copy between the device and memory of the host that is not pinned, or one that blocks");
    graph->use(source.storage().data(), false);
    graph->use(target.storage().data(), true);
  }
  HostViews views;
  const auto from = on_musa(source) ? views.of(source) : source;
  const auto to = on_musa(target) ? views.of(target) : target;
  to.copy_(from);
  if (graph != nullptr) {
    HostViews recorded;
    graph->add([from = recorded.of(source), to = recorded.of(target)] { to.copy_(from); });
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Graph::forbid("reading a value (.item())", current_stream(self.device().index()));
  HostViews views;
  return at::_local_scalar_dense(views.of(self));
}

// FlashAttention and the like have an operation for each device; the one that is composed of others serves any.
int64_t fused_sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("record_stream", [](at::Tensor&, at::Stream) {});
}

// -- for Python

// Run a function on host views of these tensors, now and in every replay: what stands for a launch of a compiled kernel.
void launch(const py::function& function, const std::vector<at::Tensor>& tensors) {
  HostViews views;
  std::vector<at::Tensor> on_host;
  auto* graph = capturing();
  for (auto& tensor : tensors) {
    if (graph != nullptr) graph->use(tensor.storage().data(), true);
    on_host.push_back(on_musa(tensor) ? views.of(tensor) : tensor);
  }
  function(on_host);
  if (graph == nullptr) return;
  auto held = std::shared_ptr<py::function>(new py::function(function), [](py::function* one) {
    const py::gil_scoped_acquire gil;
    delete one;
  });
  graph->add([held, on_host] {
    const py::gil_scoped_acquire gil;
    (*held)(on_host);
  });
}

}  // namespace

void bind_mccl(py::module_& m);

}  // namespace musa_sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using musa_sim::Graph;
  m.def("devices", &musa_sim::devices);
  m.def("total_memory", &musa_sim::total_memory);
  m.def("mapped", &musa_sim::mapped);
  m.def("synchronize", &musa_sim::synchronize);
  m.def("default_generator", &musa_sim::default_generator);
  m.def("launch", &musa_sim::launch);
  m.def("know", &musa_sim::know);
  m.def("new_pool", &Graph::new_pool);
  m.def("is_current_stream_capturing", [] { return musa_sim::capturing() != nullptr; });
  py::class_<Graph>(m, "Graph", py::dynamic_attr())
      .def(py::init<>())
      .def("capture_begin", &Graph::capture_begin, py::arg("pool") = std::pair<uint64_t, uint64_t>{0, 0},
           py::arg("capture_error_mode") = "global")
      .def("capture_end", &Graph::capture_end)
      .def("replay", &Graph::replay, py::call_guard<py::gil_scoped_release>())
      .def("reset", &Graph::reset)
      .def("pool", &Graph::pool)
      .def("__len__", &Graph::size);
  musa_sim::bind_mccl(m);
}
