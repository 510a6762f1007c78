/* Packed weights as fp32 lanes; the layout is documented in kernels/packing.py. */
#ifndef RELAY_WIDEN_H
#define RELAY_WIDEN_H

#include "program.h"
#include "vec.h"

#define PANEL 64
#define GROUP 32
#define Q8_GROUP_BYTES 2176
#define Q4_GROUP_BYTES 1280

INLINE int64_t panel_bytes(int encoding, int64_t k)
{
    switch (encoding) {
    case ENC_F32: return k * PANEL * 4;
    case ENC_BF16:
    case ENC_F16: return k * PANEL * 2;
    case ENC_Q8_0: return k / GROUP * Q8_GROUP_BYTES;
    default: return k / GROUP * Q4_GROUP_BYTES;
    }
}

/* Walks k ascending over `vectors` 16-lane columns of one panel from column `column` and calls USE(k, w[vectors]).
 * A macro because the body differs: a fused product, or a store to scratch. All sizes but `k_total` are constants after inlining. */
#define FOR_EACH_WIDENED(encoding, panel, column, vectors, k_total, w, k, USE)                                               \
    do {                                                                                                                     \
        if ((encoding) == ENC_F32) {                                                                                         \
            const float *source = (const float *)(panel) + (column);                                                         \
            for (int64_t k = 0; k < (k_total); k++) {                                                                        \
                __builtin_prefetch((const char *)(source + k * PANEL) + PREFETCH_F32);                                       \
                __builtin_prefetch((const char *)(source + k * PANEL) + PREFETCH_F32 + 64);                                  \
                __builtin_prefetch((const char *)(source + k * PANEL) + PREFETCH_F32 + 128);                                 \
                __builtin_prefetch((const char *)(source + k * PANEL) + PREFETCH_F32 + 192);                                 \
                UNROLL for (int v = 0; v < (vectors); v++) w[v] = v_load(source + k * PANEL + 16 * v);                       \
                USE                                                                                                          \
            }                                                                                                                \
        } else if ((encoding) == ENC_BF16 || (encoding) == ENC_F16) {                                                        \
            const uint16_t *source = (const uint16_t *)(panel) + (column);                                                   \
            for (int64_t k = 0; k < (k_total); k++) {                                                                        \
                __builtin_prefetch((const char *)(source + k * PANEL) + PREFETCH);                                           \
                __builtin_prefetch((const char *)(source + k * PANEL) + PREFETCH + 64);                                      \
                UNROLL for (int v = 0; v < (vectors); v++)                                                                   \
                    w[v] = (encoding) == ENC_BF16 ? v_from_bf16(source + k * PANEL + 16 * v)                                 \
                                                  : v_from_f16(source + k * PANEL + 16 * v);                                 \
                USE                                                                                                          \
            }                                                                                                                \
        } else if ((encoding) == ENC_Q8_0) {                                                                                 \
            for (int64_t group = 0; group < (k_total) / GROUP; group++) {                                                    \
                const uint8_t *block = (const uint8_t *)(panel) + group * Q8_GROUP_BYTES;                                    \
                const int8_t *q = (const int8_t *)(block + 128) + (column);                                                  \
                v16 scale[4];                                                                                        \
                UNROLL for (int v = 0; v < (vectors); v++) scale[v] = v_from_f16((const uint16_t *)block + (column) + 16 * v); \
                for (int j = 0; j < GROUP; j++) {                                                                            \
                    const int64_t k = group * GROUP + j;                                                                     \
                    __builtin_prefetch((const char *)q + j * PANEL + PREFETCH);                                              \
                    UNROLL for (int v = 0; v < (vectors); v++) w[v] = v_mul(v_from_i8(q + j * PANEL + 16 * v), scale[v]);    \
                    USE                                                                                                      \
                }                                                                                                            \
            }                                                                                                                \
        } else {                                                                                                             \
            for (int64_t group = 0; group < (k_total) / GROUP; group++) {                                                    \
                const uint8_t *block = (const uint8_t *)(panel) + group * Q4_GROUP_BYTES;                                    \
                const uint32_t *words = (const uint32_t *)(block + 256) + (column);                                          \
                v16 scale[4], minimum[4];                                                                        \
                UNROLL for (int v = 0; v < (vectors); v++) {                                                                 \
                    scale[v] = v_from_f16((const uint16_t *)block + (column) + 16 * v);                                      \
                    minimum[v] = v_from_f16((const uint16_t *)block + PANEL + (column) + 16 * v);                            \
                }                                                                                                            \
                for (int j = 0; j < 4; j++) {                                                                                \
                    i16 eight[4];                                                                                      \
                    UNROLL for (int v = 0; v < (vectors); v++) {                                                             \
                        __builtin_prefetch((const char *)(words + j * PANEL + 16 * v) + PREFETCH);                           \
                        eight[v] = i_load(words + j * PANEL + 16 * v);                                                       \
                    }                                                                                                        \
                    UNROLL for (int i = 0; i < 8; i++) {                                                                     \
                        const int64_t k = group * GROUP + 8 * j + i;                                                         \
                        UNROLL for (int v = 0; v < (vectors); v++) w[v] = v_fma(v_nibble(eight[v], 4 * i), scale[v], minimum[v]); \
                        USE                                                                                                  \
                    }                                                                                                        \
                }                                                                                                            \
            }                                                                                                                \
        }                                                                                                                    \
    } while (0)

#define PREFETCH 2560
#define PREFETCH_F32 4096

#endif
