#pragma once

// How loops come to be vectorised here. They are written for the compiler: no branches in them, and
// what they call is HVDO_INLINE. The library is built for any x86-64, so they are compiled once
// more for AVX2, which halves the time of most of them.
//
// That is without FMA, and CMakeLists.txt forbids the compiler to contract products and sums in the
// files that do this, on any machine: results must not hang on how wide vectors are, nor on where
// the tail of a loop begins.

#define HVDO_INLINE __attribute__((always_inline))

namespace hvd_order {

#if defined(__x86_64__) && defined(__GNUC__)
#define HVDO_AVX2 __attribute__((target("avx2")))

template <typename Loops>
HVDO_AVX2 void runOnAvx2(Loops loops) {
  loops();
}
#endif

/// Calls `loops`, whose call operator must be HVDO_INLINE, with the widest vectors that this CPU
/// has. Chosen by hand since target_clones needs ifunc: not every C library has that, and
/// ThreadSanitizer does not stand it.
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
