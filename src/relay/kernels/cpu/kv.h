#ifndef RELAY_KV_H
#define RELAY_KV_H

#include "program.h"

/* CRC32C (Castagnoli) of `data` continued from `crc` (0 at the start). */
uint32_t relay_crc32c(uint32_t crc, const uint8_t *data, size_t size);
/* The same of `size` bytes that it copies to `copy`; each byte of `data` is loaded once, so what is checked is what was copied. */
uint32_t relay_crc32c_copy(uint32_t crc, uint8_t *copy, const uint8_t *data, size_t size);
/* Positions [first, first + count) of one layer; `crc`, where not NULL, becomes the CRC32C of the canonical bytes. */
int relay_read_kv(const model_t *model, int layer, int first_head, int heads, const int32_t *table, int64_t first, int64_t count, uint8_t *out, uint32_t *crc);
int relay_write_kv(const model_t *model, int layer, int first_head, int heads, const int32_t *table, int64_t first, int64_t count, const uint8_t *data, uint32_t *crc);
void relay_copy_block(const model_t *model, int64_t source, int64_t target);

#endif
