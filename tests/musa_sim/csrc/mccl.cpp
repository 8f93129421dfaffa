// SPDX-License-Identifier: Apache-2.0
// Collectives between simulated devices: gloo on the same memory. What a graph captures is done again in its replays.

#include "sim.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

namespace musa_sim {

std::atomic<int> g_watchdogs{0};

namespace {

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Done = c10::intrusive_ptr<c10d::Work>;

class Mccl final : public c10d::Backend {
 public:
  Mccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {
    if (size > 1) ++g_watchdogs;
  }
  ~Mccl() override {
    if (getSize() > 1) --g_watchdogs;
  }

  const std::string getBackendName() const override { return "mccl"; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  Done broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return perform({tensors}, [=](auto& gloo, Lists lists) { return gloo.broadcast(lists[0], opts); });
  }
  Done allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return perform({tensors}, [=](auto& gloo, Lists lists) { return gloo.allreduce(lists[0], opts); });
  }
  Done reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return perform({tensors}, [=](auto& gloo, Lists lists) { return gloo.reduce(lists[0], opts); });
  }
  // Its users report that MCCL's are not reliable.
  Done allgather(Lists&, Tensors&, const c10d::AllgatherOptions&) override { return unreliable(); }
  Done _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override { return unreliable(); }
  Done gather(Lists&, Tensors&, const c10d::GatherOptions&) override { return unreliable(); }
  Done scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) override {
    const bool root = !inputs.empty();
    return perform({outputs, root ? inputs[0] : Tensors()}, [=](auto& gloo, Lists lists) {
      Lists from;
      if (root) from.push_back(lists[1]);
      return gloo.scatter(lists[0], from, opts);
    });
  }
  Done reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) override {
    return perform({outputs, inputs.at(0)}, [=](auto& gloo, Lists lists) {
      Lists from{lists[1]};
      return gloo.reduce_scatter(lists[0], from, opts);
    });
  }
  Done _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return perform({{output, input}},
                   [=](auto& gloo, Lists lists) { return gloo._reduce_scatter_base(lists[0][0], lists[0][1], opts); });
  }
  Done alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
                     const c10d::AllToAllOptions& opts) override {
    return perform({{output, input}}, [=](auto& gloo, Lists lists) mutable {
      return gloo.alltoall_base(lists[0][0], lists[0][1], to, from, opts);
    });
  }
  Done send(Tensors& tensors, int rank, int tag) override {
    return perform({tensors}, [=](auto& gloo, Lists lists) { return gloo.send(lists[0], rank, tag); });
  }
  Done recv(Tensors& tensors, int rank, int tag) override {
    return perform({tensors}, [=](auto& gloo, Lists lists) { return gloo.recv(lists[0], rank, tag); });
  }
  Done barrier(const c10d::BarrierOptions&) override {
    // With the ids of devices, which gloo does not know.
    return perform({}, [](auto& gloo, Lists) { return gloo.barrier(); });
  }

 private:
  static Done unreliable() { TORCH_CHECK(false, "MCCL's gathering may give wrong numbers, or hang"); }

  template <typename F>
  Done perform(const Lists& lists, F collective) {
    HostViews views;
    auto* graph = capturing();
    Lists on_host;
    for (auto& list : lists) {
      on_host.emplace_back();
      for (auto& tensor : list) {
        TORCH_CHECK(on_musa(tensor), "No backend type associated with device type ", tensor.device().type(),
                    ": mccl is for tensors of musa devices");
        TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
        if (graph != nullptr) graph->use(tensor.storage().data(), true);
        on_host.back().push_back(views.of(tensor));
      }
    }
    auto once = [gloo = gloo_, on_host, collective]() mutable {
      auto work = collective(*gloo, on_host);
      work->wait();
      return work;
    };
    if (graph != nullptr) graph->add([once]() mutable { once(); });
    return once();
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

void bind_mccl(py::module_& m) {
  // The base class is bound by torch.
  py::class_<Mccl, c10d::Backend, c10::intrusive_ptr<Mccl>>(m, "Mccl").def(
      py::init<c10::intrusive_ptr<c10d::Backend>, int, int>(), py::call_guard<py::gil_scoped_release>());
}

}  // namespace musa_sim
