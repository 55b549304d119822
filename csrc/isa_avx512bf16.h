// First include of a translation unit compiled for AVX-512 with products of bf16 (AVX512_BF16).
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// As in isa_avx512.h.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define KVSTRATA_ISA avx512bf16
#define KVSTRATA_ISA_AVX512 1
#define KVSTRATA_ISA_BF16 1
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#endif
