// First include of a translation unit compiled for AVX2, FMA and F16C.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVSTRATA_ISA avx2
#define KVSTRATA_ISA_AVX2 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
