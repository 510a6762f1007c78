/* CRC32C with the processor's instruction where the build has it, else eight table look-ups for eight bytes. */
#include "kv.h"

#include <string.h>

#if defined(__SSE4_2__)
#include <immintrin.h>
#define STEP8(crc, x) ((uint32_t)_mm_crc32_u64((crc), (x)))
#define STEP1(crc, x) (_mm_crc32_u8((crc), (x)))
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define STEP8(crc, x) (__crc32cd((crc), (x)))
#define STEP1(crc, x) (__crc32cb((crc), (x)))
#endif

#ifdef STEP8

/* The instruction takes three cycles and one may start in each, so three lanes run side by side. CRC is linear: the register
 * of the whole is that of each lane moved over the zero bytes of what follows it, xored. */
#define LANE 1024

static uint32_t over_lanes[2][4][256]; /* a register after LANE and after 2 LANE zero bytes, by its bytes */

__attribute__((constructor)) static void fill_over_lanes(void)
{
    uint32_t images[2][32];
    for (int bit = 0; bit < 32; bit++) {
        uint32_t state = 1u << bit;
        for (int lanes = 0; lanes < 2; lanes++) {
            for (int i = 0; i < LANE; i += 8) state = STEP8(state, 0);
            images[lanes][bit] = state;
        }
    }
    for (int lanes = 0; lanes < 2; lanes++)
        for (int byte = 0; byte < 4; byte++)
            for (int value = 0; value < 256; value++)
                for (int bit = 0; bit < 8; bit++)
                    if (value >> bit & 1) over_lanes[lanes][byte][value] ^= images[lanes][8 * byte + bit];
}

static inline uint32_t move_over(const uint32_t table[4][256], uint32_t state)
{
    return table[0][state & 255] ^ table[1][state >> 8 & 255] ^ table[2][state >> 16 & 255] ^ table[3][state >> 24];
}

/* Eight bytes of `data`, loaded once and, with `copy`, stored there: the instruction leaves the store unit idle. */
static inline uint64_t word_of(const uint8_t *data, uint8_t *copy, size_t at)
{
    typedef uint64_t __attribute__((aligned(1), may_alias)) word_t;
    const uint64_t word = *(const volatile word_t *)(data + at);
    if (copy) *(word_t *)(copy + at) = word;
    return word;
}

static inline uint32_t fold(uint32_t crc, uint8_t *copy, const uint8_t *data, size_t size)
{
    uint32_t state = ~crc;
    size_t at = 0;
    for (; at + 3 * LANE <= size; at += 3 * LANE) {
        uint32_t second = 0, third = 0;
        for (size_t i = at; i < at + LANE; i += 8) {
            state = STEP8(state, word_of(data, copy, i));
            second = STEP8(second, word_of(data, copy, i + LANE));
            third = STEP8(third, word_of(data, copy, i + 2 * LANE));
        }
        state = move_over(over_lanes[1], state) ^ move_over(over_lanes[0], second) ^ third;
    }
    for (; at + 8 <= size; at += 8) state = STEP8(state, word_of(data, copy, at));
    for (; at < size; at++) {
        const uint8_t byte = *(const volatile uint8_t *)(data + at);
        if (copy) copy[at] = byte;
        state = STEP1(state, byte);
    }
    return ~state;
}

uint32_t relay_crc32c(uint32_t crc, const uint8_t *data, size_t size) { return fold(crc, NULL, data, size); }

uint32_t relay_crc32c_copy(uint32_t crc, uint8_t *copy, const uint8_t *data, size_t size) { return fold(crc, copy, data, size); }

#else

static uint32_t table[8][256];

__attribute__((constructor)) static void fill_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t state = i;
        for (int bit = 0; bit < 8; bit++) state = state >> 1 ^ (state & 1 ? 0x82F63B78u : 0);
        table[0][i] = state;
    }
    for (int t = 1; t < 8; t++)
        for (int i = 0; i < 256; i++) table[t][i] = table[t - 1][i] >> 8 ^ table[0][table[t - 1][i] & 255];
}

uint32_t relay_crc32c(uint32_t crc, const uint8_t *data, size_t size)
{
    uint32_t state = ~crc;
    for (; size >= 8; size -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= state;
        state = 0;
        for (int i = 0; i < 8; i++) state ^= table[7 - i][word >> 8 * i & 255];
    }
    for (; size; size--, data++) state = state >> 8 ^ table[0][(state ^ *data) & 255];
    return ~state;
}

uint32_t relay_crc32c_copy(uint32_t crc, uint8_t *copy, const uint8_t *data, size_t size)
{
    memcpy(copy, data, size);
    return relay_crc32c(crc, copy, size);
}

#endif
