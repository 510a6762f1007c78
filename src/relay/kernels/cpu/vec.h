/* The vector type of all kernels: v16, sixteen fp32 lanes, whatever registers the build has. */
#ifndef RELAY_VEC_H
#define RELAY_VEC_H

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("GCC unroll 32")
#define MOST_ROWS 6 /* register tiles are arrays of fixed size, or the compiler would keep them in memory */

#if defined(RELAY_AVX512)
#include "vec_avx512.h"
#elif defined(RELAY_AVX2)
#include "vec_avx2.h"
#else
#include "vec_portable.h"
#endif

/* exp2 of the canon; coefficients as in kernels/canon.py (a test compares them through relay_exp2). */
INLINE v16 v_exp2(v16 x)
{
    v16 bounded = v_min(v_set1(127.0f), x); /* this operand order lets a NaN through */
    v16 n = v_round(bounded);
    v16 f = v_sub(bounded, n);
    v16 p = v_set1(0x1.417abap-13f);
    p = v_fma(p, f, v_set1(0x1.5f094ap-10f));
    p = v_fma(p, f, v_set1(0x1.3b2dd2p-7f));
    p = v_fma(p, f, v_set1(0x1.c6af7ap-5f));
    p = v_fma(p, f, v_set1(0x1.ebfbdcp-3f));
    p = v_fma(p, f, v_set1(0x1.62e43p-1f));
    p = v_fma(p, f, v_set1(1.0f));
    return v_scale_exp2(p, n, x);
}

#endif
