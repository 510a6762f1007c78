/* Sixteen fp32 lanes as plain C loops the compiler may vectorise; bit for bit vec_avx512.h.
 * With RELAY_NOFMA every fma rounds twice: its own instruction class and numerics id. */
#include <math.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#define TILE_ROWS 6
#else
#if defined(__FMA__)
#include <immintrin.h>
#endif
#define TILE_ROWS 2
#endif
#define TILE_VECTORS(rows) ((void)(rows), 1)
#define WIDE_TILES 0

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef struct { f32x4 q[4]; } v16;
typedef struct { u32x4 q[4]; } i16;

INLINE f32x4 fma4(f32x4 a, f32x4 b, f32x4 c)
{
#if defined(RELAY_NOFMA)
    return a * b + c;
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#elif defined(__FMA__)
    return _mm_fmadd_ps(a, b, c);
#else
#error "without a fused multiply-add build with RELAY_NOFMA"
#endif
}
#ifdef RELAY_NOFMA
INLINE float f_fma(float a, float b, float c) { return a * b + c; }
#else
INLINE float f_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif

#define EACH UNROLL for (int i = 0; i < 4; i++)
#define LANEWISE(name, expression) \
    INLINE v16 name(v16 a, v16 b) { v16 r; EACH r.q[i] = (expression); return r; }

INLINE v16 v_set1(float x) { v16 r; EACH r.q[i] = (f32x4){x, x, x, x}; return r; }
INLINE v16 v_zero(void) { return v_set1(0.0f); }
INLINE v16 v_load(const float *p) { v16 r; __builtin_memcpy(&r, p, 64); return r; }
INLINE void v_store(float *p, v16 a) { __builtin_memcpy(p, &a, 64); }
INLINE f32x4 select4(i32x4 mask, f32x4 a, f32x4 b) { return (f32x4)(((i32x4)a & mask) | ((i32x4)b & ~mask)); }
INLINE i32x4 below4(int first, long n)
{
    const int32_t bound = (int32_t)(n < 0 ? 0 : n > 16 ? 16 : n);
    return (i32x4){first, first + 1, first + 2, first + 3} < (i32x4){bound, bound, bound, bound};
}
/* Lanes < n of a, the others of b. */
INLINE v16 v_first(v16 a, v16 b, long n) { v16 r; EACH r.q[i] = select4(below4(4 * i, n), a.q[i], b.q[i]); return r; }
INLINE v16 v_load_first(const float *p, long n)
{
    float lanes[16] = {0};
    if (n >= 16) return v_load(p);
    for (long i = 0; i < n; i++) lanes[i] = p[i];
    return v_load(lanes);
}
INLINE void v_store_first(float *p, v16 a, long n)
{
    float lanes[16];
    if (n >= 16) {
        v_store(p, a);
        return;
    }
    v_store(lanes, a);
    for (long i = 0; i < n; i++) p[i] = lanes[i];
}
LANEWISE(v_add, a.q[i] + b.q[i])
LANEWISE(v_sub, a.q[i] - b.q[i])
LANEWISE(v_mul, a.q[i] * b.q[i])
LANEWISE(v_div, a.q[i] / b.q[i])
LANEWISE(v_max, select4(a.q[i] > b.q[i], a.q[i], b.q[i]))
LANEWISE(v_min, select4(a.q[i] < b.q[i], a.q[i], b.q[i]))
INLINE v16 v_fma(v16 a, v16 b, v16 c) { v16 r; EACH r.q[i] = fma4(a.q[i], b.q[i], c.q[i]); return r; }
INLINE v16 v_neg(v16 a) { v16 r; EACH r.q[i] = -a.q[i]; return r; }

INLINE float f_bits(uint32_t bits) { float f; __builtin_memcpy(&f, &bits, 4); return f; }
INLINE uint32_t bits_f(float f) { uint32_t bits; __builtin_memcpy(&bits, &f, 4); return bits; }
INLINE float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24, exact */
        float f = (float)fraction * 0x1p-24f;
        return sign ? -f : f;
    }
    return f_bits(sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | fraction << 13);
}
INLINE v16 v_from_bf16(const uint16_t *p)
{
    v16 r;
    EACH r.q[i] = (f32x4)((u32x4){p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]} << 16);
    return r;
}
INLINE v16 v_from_f16(const uint16_t *p)
{
    float lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = half_to_float(p[i]);
    return v_load(lanes);
}
INLINE f32x4 to_float4(i32x4 a) { return __builtin_convertvector(a, f32x4); }
INLINE v16 v_from_i8(const int8_t *p)
{
    v16 r;
    EACH r.q[i] = to_float4((i32x4){p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]});
    return r;
}
INLINE i16 i_load(const uint32_t *p) { i16 r; __builtin_memcpy(&r, p, 64); return r; }
INLINE v16 v_nibble(i16 words, int shift) { v16 r; EACH r.q[i] = to_float4((i32x4)(words.q[i] >> shift & 15)); return r; }
INLINE void v_store_bf16(uint16_t *p, v16 a)
{
    float lanes[16];
    v_store(lanes, a);
    for (int i = 0; i < 16; i++) {
        uint32_t bits = bits_f(lanes[i]);
        p[i] = (uint16_t)(lanes[i] != lanes[i] ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
}
/* Nearest integer, ties to even, of |a| < 2^22; what lies outside is not used (exp2 overrides it, or a NaN stays one). */
INLINE v16 v_round(v16 a) { v16 r; EACH { const f32x4 magic = (f32x4){0x1.8p23f, 0x1.8p23f, 0x1.8p23f, 0x1.8p23f}; r.q[i] = a.q[i] + magic - magic; } return r; }
/* a * 2^n for integral |n| < 2^22; 0 in lanes where x < -126. */
INLINE v16 v_scale_exp2(v16 a, v16 n, v16 x)
{
    v16 r;
    EACH {
        const f32x4 magic = (f32x4){0x1.8p23f, 0x1.8p23f, 0x1.8p23f, 0x1.8p23f};
        u32x4 power = (u32x4)(n.q[i] + magic) << 23; /* the sum's low bits hold n; the shift drops the rest */
        i32x4 dead = x.q[i] < (f32x4){-126.0f, -126.0f, -126.0f, -126.0f};
        r.q[i] = (f32x4)(((u32x4)a.q[i] + power) & ~(u32x4)dead);
    }
    return r;
}
INLINE float v_tree_sum(v16 a)
{
    f32x4 s = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]); /* (v[j] + v[j+8]) + (v[j+4] + v[j+12]) */
    return (s[0] + s[2]) + (s[1] + s[3]);
}
INLINE float v_max_lane(v16 a)
{
    float lanes[16], high;
    v_store(lanes, a);
    high = lanes[0];
    for (int i = 1; i < 16; i++) high = high > lanes[i] ? high : lanes[i];
    return high;
}
