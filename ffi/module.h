// What the platforms' Python modules share: capsules of handlers, version facts, error translation.
//
// Only this file and its includers see nanobind.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "error.h"
#include "ops.h"
#include "peer_group.h"

namespace jax_pcie {

namespace nb = ::nanobind;

inline nb::capsule HandlerCapsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

// The capsules under which JAX registers `CallSite` as a state type.
inline nb::dict CallSiteRegistration() {
  static auto info = ffi::MakeTypeInfo<CallSite>();
  nb::dict registration;
  registration["type_id"] = nb::capsule(reinterpret_cast<void*>(&CallSite::id));
  registration["type_info"] = nb::capsule(reinterpret_cast<void*>(&info));
  return registration;
}

// Targets as JAX registers them: a handler for each stage that the platform has.
using Stages = std::vector<std::pair<const char*, XLA_FFI_Handler*>>;
using Targets = std::vector<std::pair<const char*, Stages>>;

inline void DefineHandlers(nb::module_& m, Targets targets) {
  m.def("handlers", [targets = std::move(targets)] {
    nb::dict by_name;
    for (const auto& [name, stages] : targets) {
      nb::dict by_stage;
      for (const auto& [stage, handler] : stages) by_stage[stage] = HandlerCapsule(handler);
      by_name[name] = by_stage;
    }
    return by_name;
  });
  m.def("call_site_type", &CallSiteRegistration);
}

inline Targets operator+(Targets a, const Targets& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// {rows, bytes of a row} of each array of a gather, as Python plans it.
using RowsOfArrays = std::vector<std::pair<int64_t, int64_t>>;

// Facts that `_ffi.py` compares before it registers anything.
inline void DefineVersion(nb::module_& m) { m.attr("ffi_api_minor") = XLA_FFI_API_MINOR; }

// Core errors arrive in Python as the exception class that Python hands over.
inline void TranslateErrors(nb::module_& m) {
  m.def("set_error_type", [](nb::object type) {
    static nb::object* const error_type = new nb::object;  // as long-lived as the interpreter
    const bool first = !error_type->is_valid();
    *error_type = std::move(type);
    if (!first) return;
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
      try {
        std::rethrow_exception(pointer);
      } catch (const Error& error) {
        PyErr_SetString(error_type->ptr(), error.what());
      }
    });
  });
}

// The life of a group: `Group` has a constructor from options, `RequireUsable`, `RequireClosable`
// and `Close`. All of it can wait for threads that want the interpreter's lock.
template <class Group>
void DefineGroupLifetime(nb::module_& m) {
  using Slices = std::vector<std::vector<int64_t>>;
  using Groups = Registry<Group>;
  m.def(
      "create_group",
      [](std::string name, Slices slices, int64_t max_bytes, double timeout_s,
         uint64_t first_generation) {
        const GroupOptions options{std::move(name), std::move(slices), max_bytes, timeout_s,
                                   first_generation};
        return Groups::Instance().Add(std::make_shared<Group>(options));
      },
      nb::kw_only(), nb::arg("name"), nb::arg("slices"), nb::arg("max_bytes"), nb::arg("timeout_s"),
      nb::arg("first_generation"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "check_group", [](int64_t id) { Groups::Instance().Find(id)->RequireUsable(); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "close_group",
      [](int64_t id) {
        if (const auto group = Groups::Instance().Remove(id)) group->Close();
      },
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace jax_pcie
