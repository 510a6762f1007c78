/* The paged cache seen from outside: canonical bytes in and out, block copies, CRC32C.
 *
 * Canonical order of a layer: K then V of the positions, each [token][kv_head][dim] in the cache's dtype. */
#include "kv.h"

#include <string.h>

#define UNIT 16
#define CHUNK 16384 /* bytes copied before the CRC reads them again, from the first-level cache */

/* One position's K (all heads) between the cache and `token`, canonical [kv_head][dim]. */
#define MOVE_KEYS(TYPE)                                                                                                      \
    do {                                                                                                                     \
        TYPE *cache = (TYPE *)kv_keys(model, block, layer) + (int64_t)(offset / UNIT) * D * UNIT + offset % UNIT;            \
        TYPE *bytes = (TYPE *)token;                                                                                         \
        for (int h = 0; h < model->kv_heads; h++, cache += (int64_t)model->block_size * D, bytes += D)                       \
            for (int d = 0; d < D; d++) {                                                                                    \
                if (to_cache) cache[d * UNIT] = bytes[d];                                                                    \
                else bytes[d] = cache[d * UNIT];                                                                             \
            }                                                                                                                \
    } while (0)

static void move_keys(const model_t *model, int layer, int64_t block, int offset, uint8_t *token, int to_cache)
{
    const int D = model->head_dim;
    if (model->kv_half) MOVE_KEYS(uint16_t);
    else MOVE_KEYS(uint32_t);
}

static void move_values(const model_t *model, int layer, int64_t block, int offset, uint8_t *token, int to_cache)
{
    const size_t width = (size_t)model->head_dim * (size_t)kv_element(model);
    uint8_t *cache = kv_values(model, block, layer) + (size_t)offset * width;
    for (int h = 0; h < model->kv_heads; h++, cache += (size_t)model->block_size * width, token += width)
        memcpy(to_cache ? cache : token, to_cache ? token : cache, width);
}

static int move(const model_t *model, int layer, const int32_t *table, int64_t first, int64_t count, uint8_t *data, int to_cache, uint32_t *crc)
{
    const int64_t width = (int64_t)model->kv_heads * model->head_dim * kv_element(model);
    const int64_t step = CHUNK / width > 0 ? CHUNK / width : 1;
    for (int64_t position = first; position < first + count; position++) {
        const int32_t block = table[position / model->block_size];
        if (block < 0 || block >= model->num_blocks) return ERR_BLOCK;
    }
    uint32_t running = 0;
    for (int values = 0; values < 2; values++)
        for (int64_t done = 0; done < count; done += step, data += step * width) {
            const int64_t some = count - done < step ? count - done : step;
            if (crc && to_cache) running = relay_crc32c(running, data, (size_t)(some * width));
            for (int64_t i = 0; i < some; i++) {
                const int64_t position = first + done + i;
                (values ? move_values : move_keys)(model, layer, table[position / model->block_size], (int)(position % model->block_size),
                                                   data + i * width, to_cache);
            }
            if (crc && !to_cache) running = relay_crc32c(running, data, (size_t)(some * width));
            if (some < step) {
                data += some * width;
                break;
            }
        }
    if (crc) *crc = running;
    return OK;
}

int relay_read_kv(const model_t *model, int layer, const int32_t *table, int64_t first, int64_t count, uint8_t *out, uint32_t *crc)
{
    return move(model, layer, table, first, count, out, 0, crc);
}

int relay_write_kv(const model_t *model, int layer, const int32_t *table, int64_t first, int64_t count, const uint8_t *data, uint32_t *crc)
{
    return move(model, layer, table, first, count, (uint8_t *)data, 1, crc);
}

void relay_copy_block(const model_t *model, int64_t source, int64_t target)
{
    memcpy(model->kv + target * model->block_bytes, model->kv + source * model->block_bytes, (size_t)model->block_bytes);
}
