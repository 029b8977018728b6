// Kernels: the CPU's, run later on the stream's thread, with shapes told beforehand by torch's meta kernels.
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zero_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <set>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Runtime& runtime() { return Runtime::get(); }

Span span_of(const Tensor& tensor, bool writes) {
  auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  size_t items = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) items += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {begin, begin + (tensor.numel() ? items * tensor.itemsize() : 0), writes};
}

// The same memory as the CPU sees it. It keeps nothing alive, as a queued kernel does not.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != KIND) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(behind(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

// What a kernel is given: of the host's tensors the values of now, since it is the caller's who may write or drop them before it
// runs (the last one to drop a tensor of Python's wants the interpreter's lock, which somebody who waits for the kernel may hold).
Tensor given(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() == KIND) return on_cpu(tensor);
  return tensor.detach().clone();
}

Tensor on_meta(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != KIND) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

IValue each(const IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> found;
    for (const Tensor& tensor : value.toTensorVector()) found.push_back(change(tensor));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> found;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      found.push_back(tensor.has_value() ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    return found;
  }
  return value;
}

void tensors_of(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  each(value, [&](const Tensor& tensor) {
    if (tensor.defined() && tensor.device().type() == KIND) visit(tensor);
    return tensor;
  });
}

// --- copies --------------------------------------------------------------------------------------------------------------
void enqueue(Stream& stream, const std::string& what, std::function<void()> run, const std::vector<Span>& spans, size_t nbytes = 0) {
  runtime().check();
  bool inference = c10::InferenceMode::is_enabled();  // as the caller is
  double us = nbytes ? runtime().copy_us_per_mib * nbytes / (1 << 20) : runtime().kernel_us;
  stream.enqueue(
      {[run = std::move(run), us, inference] {
         if (us > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us));
         at::AutoDispatchBelowAutograd guard;
         c10::InferenceMode mode(inference);
         run();
       },
       what},
      spans);
}

void count_copy() {
  if (runtime().copies_left == 0) runtime().failed("a copy failed");
  if (runtime().copies_left > 0) --runtime().copies_left;
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  const Tensor source = from.expand_as(self);
  if (self.numel() == 0) return self;
  bool out = self.device().type() == KIND, in = source.device().type() == KIND;
  c10::DeviceGuard guard(out ? self.device() : source.device());
  Stream& stream = runtime().current_stream(runtime().current_device());
  runtime().check();
  if (out && in) {
    Tensor to = on_cpu(self), what = on_cpu(source);
    enqueue(stream, "copy_", [to, what]() mutable { to.copy_(what); }, {span_of(source, false), span_of(self, true)});
    return self;
  }
  count_copy();
  if (out) {
    Tensor here = source.contiguous().to(self.scalar_type());
    bool pinned = runtime().registered(reinterpret_cast<uintptr_t>(source.data_ptr()), source.nbytes());
    bool staged = !(pinned && here.is_same(source));
    if (staged) here = here.clone();
    Tensor to = on_cpu(self);
    if (self.is_contiguous()) {
      std::vector<Span> spans = {span_of(self, true)};
      if (!staged) spans.push_back(span_of(here, false));
      Tensor from_host = staged ? here : at::from_blob(here.data_ptr(), here.sizes(), here.options());
      enqueue(stream, "copy to the device", [to, from_host]() mutable { to.copy_(from_host); }, spans, self.nbytes());
    } else {
      Tensor room = at::empty(self.sizes(), self.options());  // as on real devices: counted in the peak
      Tensor between = on_cpu(room);
      enqueue(stream, "copy to the device", [between, here]() mutable { between.copy_(here); }, {span_of(room, true)}, self.nbytes());
      enqueue(stream, "copy_", [to, between]() mutable { to.copy_(between); }, {span_of(room, false), span_of(self, true)});
    }
    if (staged || !non_blocking) runtime().synchronize(stream);
    return self;
  }
  Tensor there = source;
  if (!source.is_contiguous() || source.scalar_type() != self.scalar_type()) {
    there = at::empty(source.sizes(), source.options().dtype(self.scalar_type()));
    copy_(there, source, true);
  }
  bool pinned = self.is_contiguous() && runtime().registered(reinterpret_cast<uintptr_t>(self.data_ptr()), self.nbytes());
  Tensor what = on_cpu(there);
  if (pinned) {
    Tensor to = at::from_blob(self.data_ptr(), self.sizes(), self.options());
    enqueue(stream, "copy to the host", [to, what]() mutable { to.copy_(what); }, {span_of(there, false), span_of(self, true)}, self.nbytes());
    if (!non_blocking) runtime().synchronize(stream);
  } else {  // behind all that is queued, however it was asked for
    enqueue(stream, "copy to the host", [] {}, {span_of(there, false)}, self.nbytes());
    runtime().synchronize(stream);
    self.copy_(what);
  }
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  Tensor here = at::empty(self.sizes(), self.options().device(at::kCPU));
  copy_(here, self, false);
  return here.item();
}

// --- every other kernel ----------------------------------------------------------------------------------------------------
const std::set<std::string> AT_ONCE = {"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::is_nonzero"};

bool written(const c10::FunctionSchema& schema, size_t at) {
  const auto* info = schema.arguments()[at].alias_info();
  if (info != nullptr && info->isWrite()) return true;
  return schema.name() == "aten::native_batch_norm" && (at == 3 || at == 4);  // its schema does not say so
}

// The argument that a return value is, or -1.
int64_t returned(const c10::FunctionSchema& schema, size_t at) {
  const auto* info = schema.returns()[at].alias_info();
  if (info == nullptr) return -1;
  for (size_t arg = 0; arg < schema.arguments().size(); ++arg) {
    const auto* other = schema.arguments()[arg].alias_info();
    if (other != nullptr && other->beforeSets() == info->beforeSets()) return static_cast<int64_t>(arg);
  }
  return -1;
}

// The device's own random numbers, drawn by the CPU's generator in the same state.
struct Draws {
  at::Generator of, here;
  explicit Draws(at::Generator device) : of(std::move(device)), here(at::detail::createCPUGenerator()) { here.set_state(of.get_state()); }
  ~Draws() { of.set_state(here.get_state()); }
};

void any_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowAutograd below;
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  std::vector<IValue> args(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  std::optional<c10::Device> device;
  for (const IValue& arg : args)
    tensors_of(arg, [&](const Tensor& tensor) {
      if (!device) device = tensor.device();
    });
  for (const IValue& arg : args)
    if (!device && arg.isDevice() && arg.toDevice().type() == KIND) device = arg.toDevice();
  TORCH_CHECK(device.has_value(), "sim: ", schema.name(), " has nothing on the device");
  c10::DeviceGuard guard(*device);
  Stream& stream = runtime().current_stream(device->index());
  bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  bool at_once = random || AT_ONCE.count(schema.name());
  bool all_returned = true;
  for (size_t at = 0; at < schema.returns().size(); ++at) {
    const auto* info = schema.returns()[at].alias_info();
    TORCH_CHECK(info == nullptr || info->isWrite(), "sim: the view ", schema.name(), " is missing");
    all_returned = all_returned && returned(schema, at) >= 0;
  }
  bool out = schema.is_mutable() && schema.overload_name().find("out") != std::string::npos;
  torch::jit::Stack outs;
  if (!at_once && (out || !all_returned)) {
    torch::jit::Stack metas;
    for (const IValue& arg : args) metas.push_back(arg.isDevice() ? IValue(c10::Device(at::kMeta)) : each(arg, on_meta));
    torch::jit::Stack kept(metas);
    try {
      op.callBoxed(&metas);
      outs = std::move(metas);
      for (size_t at = 0; out && at < count; ++at)
        if (written(schema, at) && args[at].isTensor() && args[at].toTensor().sizes() != kept[at].toTensor().sizes())
          args[at].toTensor().resize_(kept[at].toTensor().sizes());
    } catch (const c10::Error&) {
      at_once = true;  // no shapes without values
    }
  }
  std::vector<Span> spans;
  for (size_t at = 0; at < count; ++at)
    tensors_of(args[at], [&](const Tensor& tensor) { spans.push_back(span_of(tensor, written(schema, at))); });
  std::optional<Draws> draws;
  torch::jit::Stack here;
  for (size_t at = 0; at < count; ++at) {
    if (args[at].isDevice()) here.push_back(c10::Device(at::kCPU));
    else if (random && schema.arguments()[at].name() == "generator") {
      draws.emplace(args[at].isGenerator() ? args[at].toGenerator() : at::globalContext().defaultGenerator(*device));
      here.push_back(draws->here);
    } else here.push_back(each(args[at], at_once || written(schema, at) ? on_cpu : given));
  }
  if (random && spans.size() == 1 && spans[0].writes && args[0].isTensor()) {  // it is drawn now, as on real devices, and written later
    Tensor to = here[0].toTensor(), drawn = at::empty_strided(to.sizes(), to.strides(), to.options());
    here[0] = drawn;
    op.callBoxed(&here);
    enqueue(stream, schema.name(), [to, drawn]() mutable { to.copy_(drawn); }, spans);
    stack->push_back(args[0]);
    return;
  }
  if (at_once) {
    enqueue(stream, schema.name(), [] {}, spans);
    runtime().synchronize(stream);
    op.callBoxed(&here);
    for (size_t at = 0; at < schema.returns().size(); ++at) {
      int64_t same = returned(schema, at);
      if (same >= 0) stack->push_back(args[same]);
      else
        stack->push_back(each(here[at], [&](const Tensor& tensor) {
          if (!tensor.defined()) return tensor;
          Tensor there = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*device));
          on_cpu(there).copy_(tensor);
          return there;
        }));
    }
    return;
  }
  std::vector<Tensor> fresh;  // aliases of what is returned anew, in order; undefined ones among them
  for (size_t at = 0; at < schema.returns().size(); ++at) {
    int64_t same = returned(schema, at);
    if (same >= 0) {
      stack->push_back(args[same]);
      continue;
    }
    stack->push_back(each(outs[at].isNone() ? IValue(Tensor()) : outs[at], [&](const Tensor& meta) {
      fresh.emplace_back();
      if (!meta.defined()) return meta;
      Tensor there = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(*device));
      fresh.back() = on_cpu(there);
      spans.push_back(span_of(there, true));
      return there;
    }));
  }
  auto handle = op;
  std::string name = schema.name();
  enqueue(stream, name, [handle, here, fresh, name]() mutable {
    handle.callBoxed(&here);
    if (fresh.empty()) return;
    size_t next = 0;
    const auto& returns = handle.schema().returns();
    for (size_t at = 0; at < returns.size(); ++at) {
      if (returned(handle.schema(), at) >= 0) continue;
      each(here[at].isNone() ? IValue(Tensor()) : here[at], [&](const Tensor& tensor) {
        Tensor& to = fresh.at(next++);
        if (!tensor.defined() || !to.defined()) return tensor;
        if (tensor.numel() == to.numel()) to.copy_(tensor.reshape(to.sizes()));
        else TORCH_CHECK(tensor.numel() == 0 || to.numel() == 0, name, " made ", tensor.sizes(), " where ", to.sizes(), " were told");
        return tensor;
      });
    }
  }, spans);
}

// --- without kernels -----------------------------------------------------------------------------------------------------
Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(KIND)));
  return at::detail::empty_generic(size, c10::GetAllocator(KIND), KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(KIND)));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(KIND), KEYS, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  impl->set_sizes_contiguous(sizes);
  size_t nbytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (nbytes > impl->storage().nbytes()) at::native::resize_bytes_nocuda(impl->unsafe_storage(), nbytes);
  return self;
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at = offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor& set_whole(Tensor& self, at::Storage source) {
  auto items = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {items}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }

void record_stream(Tensor& self, at::Stream stream) {
  c10::impl::getDeviceGuardImpl(KIND)->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_kernel>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream);
  m.impl("_local_scalar_dense", &local_scalar);
}

// --- sparse: what an embedding's gradient asks for ---------------------------------------------------------------------------
Tensor& add_sparse(Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  if (self.is_sparse()) {
    auto indices = at::cat({self._indices(), other._indices()}, 1), values = at::cat({self._values(), other._values().mul(alpha)});
    static_cast<at::SparseTensorImpl*>(self.unsafeGetTensorImpl())->set_indices_and_values_unsafe(indices, values);
    return self._coalesced_(false);
  }
  c10::List<std::optional<Tensor>> rows;
  for (const Tensor& row : other._indices().unbind(0)) rows.push_back(row);
  return self.index_put_(rows, other._values().mul(alpha), true);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("clone", &at::native::clone_sparse);
  m.impl("zero_", &at::native::zero_sparse_);
  m.impl("sparse_resize_and_clear_", &at::native::sparse_resize_and_clear_);
  m.impl("add_.Tensor", &add_sparse);
}

// --- for tests -------------------------------------------------------------------------------------------------------------
void hold(int64_t stream, bool held) { runtime().stream(static_cast<int>(stream)).hold(held); }
void fail(std::string why) { runtime().failed(why); }
void reset() { runtime().reset(); }
void sleep(double us) {
  enqueue(runtime().current_stream(runtime().current_device()), "sleep",
          [us] { std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us)); }, {});
}
void tune(std::string what, double value) {
  auto& one = runtime();
  if (what == "kernel_us") one.kernel_us = value;
  else if (what == "copy_us_per_mib") one.copy_us_per_mib = value;
  else if (what == "register_us_per_mib") one.register_us_per_mib = value;
  else if (what == "registrations") one.registrations_left = static_cast<int64_t>(value);
  else if (what == "copies") one.copies_left = static_cast<int64_t>(value);
  else if (what == "memory") one.memory_limit = static_cast<int64_t>(value);
  else if (what == "poison") one.poison = value != 0;
  else TORCH_CHECK(false, "sim: nothing is called ", what);
}
bool capturing() { return runtime().capturing(runtime().current_stream(runtime().current_device())); }
std::vector<int64_t> contexts() { return {runtime().contexts.begin(), runtime().contexts.end()}; }
std::vector<std::string> races() { return runtime().races(); }
void host_reads(int64_t address, int64_t nbytes, std::string what) { runtime().host_reads(address, nbytes, what); }
void register_host(int64_t address, int64_t nbytes) { runtime().register_host(address, nbytes); }
void unregister_host(int64_t address) { runtime().unregister_host(address); }
int64_t peak(int64_t device) { return runtime().devices[device].peak; }
int64_t allocated(int64_t device) { return runtime().devices[device].allocated; }
void forget_peak(int64_t device) { runtime().devices[device].peak = runtime().devices[device].allocated; }

at::Generator generator(int64_t device) { return at::globalContext().defaultGenerator(c10::Device(KIND, static_cast<c10::DeviceIndex>(device))); }

TORCH_LIBRARY(sim, m) {
  m.def("generator", &generator);
  m.def("hold", &hold);
  m.def("reset", &reset);
  m.def("fail", &fail);
  m.def("sleep", &sleep);
  m.def("tune", &tune);
  m.def("races", &races);
  m.def("contexts", &contexts);
  m.def("capturing", &capturing);
  m.def("host_reads", &host_reads);
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
  m.def("peak", &peak);
  m.def("allocated", &allocated);
  m.def("forget_peak", &forget_peak);
}

}  // namespace
}  // namespace sim
