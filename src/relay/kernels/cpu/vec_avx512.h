/* Sixteen fp32 lanes in one zmm register. Every function has an equal (bit for bit) in vec_avx2.h and vec_portable.h. */
#include <immintrin.h>

typedef __m512 v16;
typedef __m512i i16;

/* Register tile of a matrix product: rows, and 16-lane vectors for so many rows. */
#define TILE_ROWS 6
#define TILE_VECTORS(rows) ((void)(rows), 4)
#define WIDE_TILES 1 /* whether tiles of every height are four vectors wide */

INLINE float f_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE v16 v_zero(void) { return _mm512_setzero_ps(); }
INLINE v16 v_set1(float x) { return _mm512_set1_ps(x); }
INLINE v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
INLINE __mmask16 v_mask(long n) { return (__mmask16)(n >= 16 ? 0xFFFF : (1u << (n < 0 ? 0 : n)) - 1); }
INLINE v16 v_load_first(const float *p, long n) { return _mm512_maskz_loadu_ps(v_mask(n), p); }
INLINE void v_store_first(float *p, v16 a, long n) { _mm512_mask_storeu_ps(p, v_mask(n), a); }
/* Lanes < n of a, the others of b. */
INLINE v16 v_first(v16 a, v16 b, long n) { return _mm512_mask_blend_ps(v_mask(n), b, a); }
INLINE v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
INLINE v16 v_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
INLINE v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
INLINE v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
INLINE v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
INLINE v16 v_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE v16 v_neg(v16 a) { return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)0x80000000u))); }

INLINE v16 v_from_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE v16 v_from_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE v16 v_from_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE i16 i_load(const uint32_t *p) { return _mm512_loadu_si512(p); }
/* Nibble of each word as a float; vpermps reads only the low four bits of an index, so no mask is needed. */
INLINE v16 v_nibble(i16 words, int shift)
{
    const v16 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, (unsigned)shift), table);
}
/* Round to bfloat16, nearest even; a NaN stays one. */
INLINE void v_store_bf16(uint16_t *p, v16 a)
{
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i even = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, even, quiet)));
}
/* a * 2^n for integral n; 0 in lanes where x < -126. */
INLINE v16 v_scale_exp2(v16 a, v16 n, v16 x)
{
    __m512i bits = _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23));
    __mmask16 dead = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_LT_OQ);
    return _mm512_castsi512_ps(_mm512_mask_blend_epi32(dead, bits, _mm512_setzero_si512()));
}
INLINE v16 v_round(v16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* The canon's tree: fold halves of 8, 4, 2, 1. */
INLINE float v_tree_sum(v16 a)
{
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
INLINE float v_max_lane(v16 a) { return _mm512_reduce_max_ps(a); }
