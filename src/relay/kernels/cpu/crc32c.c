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

uint32_t relay_crc32c(uint32_t crc, const uint8_t *data, size_t size)
{
    uint32_t state = ~crc;
    for (; size >= 8; size -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        state = STEP8(state, word);
    }
    for (; size; size--, data++) state = STEP1(state, *data);
    return ~state;
}

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

#endif
