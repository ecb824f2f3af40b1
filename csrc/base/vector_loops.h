#pragma once

// How loops are vectorised here. Loops are written for the compiler: they have no branches, and
// the functions that they call are HVDO_INLINE. The library is built for any x86-64, so the loops
// are compiled a second time for AVX2, which halves the time of most of them.
//
// FMA is not used, and CMakeLists.txt forbids the compiler to contract products and sums in the
// files that use these loops, on any machine: results must not depend on the width of vectors, nor
// on where the tail of a loop begins.

#ifdef __CUDACC__
#define HVDO_INLINE __host__ __device__ __attribute__((always_inline)) // kernels call the functions
#else
#define HVDO_INLINE __attribute__((always_inline))
#endif

namespace hvd_order {

#if defined(__x86_64__) && defined(__GNUC__)
#define HVDO_AVX2 __attribute__((target("avx2")))

template <typename Loops>
HVDO_AVX2 void runOnAvx2(Loops loops) {
  loops();
}
#endif

/// Calls `loops`, whose call operator must be HVDO_INLINE, with the widest vectors of this CPU.
/// The choice is made by hand because target_clones needs ifunc: not every C library has it, and
/// ThreadSanitizer does not support it.
template <typename Loops>
void runOnWidestVectors(Loops loops) {
#ifdef HVDO_AVX2
  static const bool kHasAvx2 = __builtin_cpu_supports("avx2") != 0;
  if (kHasAvx2) {
    runOnAvx2(loops);
    return;
  }
#endif
  loops();
}

} // namespace hvd_order
