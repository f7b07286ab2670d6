// Finds cuBLASLt: the one that the process has already, or the newest that the loader knows.
#include "cublaslt_api.h"

#include <dlfcn.h>

#include "../../error.h"

namespace jax_pcie::cuda::cublaslt {
namespace {

constexpr const char* kSonames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

// JAX's CUDA plugin has usually loaded it from its wheel, outside the loader's search path; two
// copies in one process would cost half a gigabyte.
void* OpenLibrary() {
  for (const int already_loaded : {RTLD_NOLOAD, 0}) {
    for (const char* soname : kSonames) {
      if (void* library = dlopen(soname, RTLD_LAZY | RTLD_LOCAL | already_loaded)) return library;
    }
  }
  const char* reason = dlerror();
  throw Error(Concat("cuBLASLt (", kSonames[0], " or ", kSonames[1],
                     ") cannot be loaded: ", reason ? reason : "no reason given",
                     "; JAX's CUDA wheels bring it as nvidia-cublas"));
}

template <class Function>
void Find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  Require(function != nullptr, "the cuBLASLt that this process loaded has no ", name);
}

Library Load() {
  Library found{};
  try {
    void* library = OpenLibrary();
    Api& api = found.api;
    Find(library, "cublasLtGetVersion", api.get_version);
    Find(library, "cublasLtGetStatusName", api.get_status_name);
    Find(library, "cublasLtCreate", api.create);
    Find(library, "cublasLtMatmulDescCreate", api.desc_create);
    Find(library, "cublasLtMatmulDescDestroy", api.desc_destroy);
    Find(library, "cublasLtMatmulDescSetAttribute", api.desc_set);
    Find(library, "cublasLtMatrixLayoutCreate", api.layout_create);
    Find(library, "cublasLtMatrixLayoutDestroy", api.layout_destroy);
    Find(library, "cublasLtMatmulPreferenceCreate", api.preference_create);
    Find(library, "cublasLtMatmulPreferenceDestroy", api.preference_destroy);
    Find(library, "cublasLtMatmulPreferenceSetAttribute", api.preference_set);
    Find(library, "cublasLtMatmulAlgoGetHeuristic", api.get_heuristic);
    Find(library, "cublasLtMatmul", api.matmul);
    found.version = static_cast<int64_t>(api.get_version());
  } catch (const Error& error) {
    found.error = error.what();
  }
  return found;
}

}  // namespace

const Library& TheLibrary() {
  static const Library library = Load();
  return library;
}

}  // namespace jax_pcie::cuda::cublaslt
