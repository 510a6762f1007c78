/* Tiles of 16-byte rows transposed in registers: between K as the cache keeps it (dim-major) and as it is sent (token-major). */
#ifndef RELAY_TRANSPOSE_H
#define RELAY_TRANSPOSE_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define RELAY_SHUFFLES
#endif
#endif

#ifdef RELAY_SHUFFLES
typedef uint32_t w4 __attribute__((vector_size(16)));
typedef uint16_t h8 __attribute__((vector_size(16)));
#define LOW16(a, b) __builtin_shufflevector((a), (b), 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH16(a, b) __builtin_shufflevector((a), (b), 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW32(a, b) __builtin_shufflevector((a), (b), 0, 4, 1, 5)
#define HIGH32(a, b) __builtin_shufflevector((a), (b), 2, 6, 3, 7)
#define LOW64(a, b) __builtin_shufflevector((a), (b), 0, 1, 4, 5)
#define HIGH64(a, b) __builtin_shufflevector((a), (b), 2, 3, 6, 7)

/* 16 bytes; `past` the caches where the processor can: what D receives is more than they hold, and a line that is written whole
 * need not be fetched first. `to` is a multiple of 16 then. */
static inline void put16(uint8_t *to, w4 value, int past)
{
#if defined(__SSE2__)
    if (past) _mm_stream_si128((__m128i *)to, (__m128i)value);
    else
#endif
        memcpy(to, &value, 16);
    (void)past;
}

/* Four rows of four 32-bit elements become four columns. Strides in bytes. */
static inline void transpose_4x4(const uint8_t *from, int64_t from_stride, uint8_t *to, int64_t to_stride, int past)
{
    w4 r[4], t[4];
    for (int i = 0; i < 4; i++) memcpy(&r[i], from + i * from_stride, 16);
    t[0] = LOW32(r[0], r[1]), t[1] = LOW32(r[2], r[3]), t[2] = HIGH32(r[0], r[1]), t[3] = HIGH32(r[2], r[3]);
    r[0] = LOW64(t[0], t[1]), r[1] = HIGH64(t[0], t[1]), r[2] = LOW64(t[2], t[3]), r[3] = HIGH64(t[2], t[3]);
    for (int i = 0; i < 4; i++) put16(to + i * to_stride, r[i], past);
}

/* Eight rows of eight 16-bit elements become eight columns. */
static inline void transpose_8x8(const uint8_t *from, int64_t from_stride, uint8_t *to, int64_t to_stride, int past)
{
    h8 r[8];
    w4 pairs[8], fours[8]; /* pairs[2i], [2i + 1]: columns 0-3 and 4-7 of rows 2i and 2i + 1, interleaved */
    for (int i = 0; i < 8; i++) memcpy(&r[i], from + i * from_stride, 16);
    for (int i = 0; i < 8; i += 2) pairs[i] = (w4)LOW16(r[i], r[i + 1]), pairs[i + 1] = (w4)HIGH16(r[i], r[i + 1]);
    for (int half = 0; half < 2; half++) /* fours[4 half + c]: columns 2c and 2c + 1 of rows 4 half to 4 half + 3 */
        for (int c = 0; c < 4; c += 2) {
            const w4 a = pairs[4 * half + c / 2], b = pairs[4 * half + 2 + c / 2];
            fours[4 * half + c] = LOW32(a, b), fours[4 * half + c + 1] = HIGH32(a, b);
        }
    for (int c = 0; c < 4; c++) {
        const w4 even = LOW64(fours[c], fours[4 + c]), odd = HIGH64(fours[c], fours[4 + c]);
        put16(to + 2 * c * to_stride, even, past);
        put16(to + (2 * c + 1) * to_stride, odd, past);
    }
}
#endif

#endif
