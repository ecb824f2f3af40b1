// Included in every file of a wheel (scripts/build_wheels.py): GCC 12 gave this one function that hvd_order
// calls a second version, the same but for `noexcept`. The first is in libstdc++ since GCC 4.4, so wheels
// also load beside GCC 11's, as in RHEL 9. Elsewhere, as where it is not called, the line has no effect.
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
