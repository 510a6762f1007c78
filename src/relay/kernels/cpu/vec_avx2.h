/* Sixteen fp32 lanes as two ymm registers; bit for bit vec_avx512.h. */
#include <immintrin.h>

typedef struct { __m256 lo, hi; } v16;
typedef struct { __m256i lo, hi; } i16;

#define TILE_ROWS 6
#define TILE_VECTORS(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#define WIDE_TILES 0

#define PAIR(name, lo_, hi_) ((name){(lo_), (hi_)})

INLINE float f_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE v16 v_zero(void) { return PAIR(v16, _mm256_setzero_ps(), _mm256_setzero_ps()); }
INLINE v16 v_set1(float x) { return PAIR(v16, _mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE v16 v_load(const float *p) { return PAIR(v16, _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void v_store(float *p, v16 a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
INLINE __m256i v_half_mask(long n)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n < 0 ? 0 : n > 8 ? 8 : n)), lane);
}
INLINE v16 v_load_first(const float *p, long n)
{
    return PAIR(v16, _mm256_maskload_ps(p, v_half_mask(n)), _mm256_maskload_ps(p + 8, v_half_mask(n - 8)));
}
INLINE void v_store_first(float *p, v16 a, long n)
{
    _mm256_maskstore_ps(p, v_half_mask(n), a.lo), _mm256_maskstore_ps(p + 8, v_half_mask(n - 8), a.hi);
}
INLINE v16 v_first(v16 a, v16 b, long n)
{
    return PAIR(v16, _mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(v_half_mask(n))),
                _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(v_half_mask(n - 8))));
}
#define LANEWISE(name, op) \
    INLINE v16 name(v16 a, v16 b) { return PAIR(v16, op(a.lo, b.lo), op(a.hi, b.hi)); }
LANEWISE(v_add, _mm256_add_ps)
LANEWISE(v_sub, _mm256_sub_ps)
LANEWISE(v_mul, _mm256_mul_ps)
LANEWISE(v_div, _mm256_div_ps)
LANEWISE(v_max, _mm256_max_ps)
LANEWISE(v_min, _mm256_min_ps)
INLINE v16 v_fma(v16 a, v16 b, v16 c) { return PAIR(v16, _mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)); }
INLINE v16 v_neg(v16 a)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return PAIR(v16, _mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign));
}

INLINE __m256 widen_bf16_half(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE v16 v_from_bf16(const uint16_t *p) { return PAIR(v16, widen_bf16_half(p), widen_bf16_half(p + 8)); }
INLINE v16 v_from_f16(const uint16_t *p)
{
    return PAIR(v16, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
INLINE v16 v_from_i8(const int8_t *p)
{
    return PAIR(v16, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))));
}
INLINE i16 i_load(const uint32_t *p)
{
    return PAIR(i16, _mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8)));
}
INLINE v16 v_nibble(i16 words, int shift)
{
    const __m256i mask = _mm256_set1_epi32(15);
    return PAIR(v16, _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(words.lo, shift), mask)),
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(words.hi, shift), mask)));
}
INLINE __m256i round_bf16_half(__m256 a)
{
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i even = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(even, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
INLINE void v_store_bf16(uint16_t *p, v16 a)
{
    __m256i packed = _mm256_packus_epi32(round_bf16_half(a.lo), round_bf16_half(a.hi));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xD8));
}
INLINE __m256 scale_exp2_half(__m256 a, __m256 n, __m256 x)
{
    __m256i bits = _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), _mm256_castsi256_ps(bits));
}
INLINE v16 v_scale_exp2(v16 a, v16 n, v16 x) { return PAIR(v16, scale_exp2_half(a.lo, n.lo, x.lo), scale_exp2_half(a.hi, n.hi, x.hi)); }
INLINE v16 v_round(v16 a)
{
    return PAIR(v16, _mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE float v_tree_sum(v16 a)
{
    __m256 h = _mm256_add_ps(a.lo, a.hi);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
INLINE float v_max_lane(v16 a)
{
    __m256 h = _mm256_max_ps(a.lo, a.hi);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
