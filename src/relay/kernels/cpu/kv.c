/* The paged cache seen from outside: canonical bytes in and out, block copies, CRC32C.
 *
 * Canonical order of a layer: K then V of the positions, each [token][kv_head][dim] in the cache's dtype, of a range of heads. Bytes move in pieces of at
 * most one unit, small enough that the CRC and the copy share them in the first-level cache. On the way in a piece is first fetched
 * into private memory: `data` may be shared with another process, and what is checked must be what is written. From there it goes
 * past the caches: a line written whole needs no fetching, and D reads it once, at its first step. */
#include "kv.h"

#include <string.h>

#include "transpose.h"

#define UNIT 16
#define PIECE_BYTES 32768

/* K of a whole unit of one head: cache [dim][16], bytes [16] rows `width` apart. 0 where this build cannot. */
static int move_unit(const model_t *model, uint8_t *cache, uint8_t *bytes, int64_t width, int to_cache)
{
#ifdef RELAY_SHUFFLES
    const int64_t element = kv_element(model), column = UNIT * element;
    const int side = (int)(16 / element), past = to_cache && (uintptr_t)cache % 16 == 0;
    for (int d = 0; d < model->head_dim; d += side)
        for (int token = 0; token < UNIT; token += side) {
            uint8_t *tile = cache + d * column + token * element, *rows = bytes + token * width + d * element;
            if (side == 4 && to_cache) transpose_4x4(rows, width, tile, column, past);
            else if (side == 4) transpose_4x4(tile, column, rows, width, 0);
            else if (to_cache) transpose_8x8(rows, width, tile, column, past);
            else transpose_8x8(tile, column, rows, width, 0);
        }
    return 1;
#else
    (void)model, (void)cache, (void)bytes, (void)width, (void)to_cache;
    return 0;
#endif
}

#define MOVE_KEY(TYPE, cache, bytes)                                                   \
    for (int d = 0; d < model->head_dim; d++) {                                        \
        if (to_cache) ((TYPE *)(cache))[d * UNIT] = ((TYPE *)(bytes))[d];              \
        else ((TYPE *)(bytes))[d] = ((TYPE *)(cache))[d * UNIT];                       \
    }

/* K of positions `offset`.. of one block, all in one unit, between the cache and rows `width` apart. */
static void move_keys(const model_t *model, int layer, int64_t block, int first_head, int heads, int64_t offset, int64_t count, uint8_t *bytes, int64_t width, int to_cache)
{
    const int64_t element = kv_element(model), head = model->head_dim * element;
    uint8_t *cache = kv_keys(model, block, layer) + first_head * model->block_size * head + offset / UNIT * UNIT * head;
    for (int h = 0; h < heads; h++, cache += model->block_size * head, bytes += head) {
        if (count == UNIT && move_unit(model, cache, bytes, width, to_cache)) continue;
        for (int64_t i = 0; i < count; i++) {
            uint8_t *column = cache + (offset + i) % UNIT * element, *row = bytes + i * width;
            if (model->kv_half) MOVE_KEY(uint16_t, column, row)
            else MOVE_KEY(uint32_t, column, row)
        }
    }
}

/* `size` bytes into the cache. */
static inline void copy_past(uint8_t *to, const uint8_t *from, size_t size)
{
#ifdef RELAY_SHUFFLES
    if ((uintptr_t)to % 16 == 0 && size % 16 == 0) {
        for (size_t at = 0; at < size; at += 16) {
            w4 value;
            memcpy(&value, from + at, 16);
            put16(to + at, value, 1);
        }
        return;
    }
#endif
    memcpy(to, from, size);
}

static void move_values(const model_t *model, int layer, int64_t block, int first_head, int heads, int64_t offset, int64_t count, uint8_t *bytes, int64_t width, int to_cache)
{
    const size_t head = (size_t)(model->head_dim * kv_element(model));
    uint8_t *cache = kv_values(model, block, layer) + (first_head * (int64_t)model->block_size + offset) * (int64_t)head;
    for (int h = 0; h < heads; h++, cache += model->block_size * (int64_t)head, bytes += head)
        for (int64_t i = 0; i < count; i++) {
            uint8_t *there = cache + i * (int64_t)head, *row = bytes + i * width;
            if (to_cache) copy_past(there, row, head);
            else memcpy(row, there, head);
        }
}

static int move(const model_t *model, int layer, int first_head, int heads, const int32_t *table, int64_t first, int64_t count, uint8_t *data, int to_cache, uint32_t *crc)
{
    uint8_t piece[PIECE_BYTES];
    const int64_t width = (int64_t)heads * model->head_dim * kv_element(model), end = first + count;
    for (int64_t position = first; position < end; position++) {
        const int32_t block = table[position / model->block_size];
        if (block < 0 || block >= model->num_blocks) return ERR_BLOCK;
    }
    if (first_head < 0 || heads < 1 || first_head > model->kv_heads - heads || width > PIECE_BYTES) return ERR_SHAPE;
    const int64_t most = PIECE_BYTES / width;
    uint32_t running = 0;
    for (int values = 0; values < 2; values++)
        for (int64_t position = first, some; position < end; position += some, data += some * width) {
            const int64_t offset = position % model->block_size;
            uint8_t *bytes = data;
            some = UNIT - position % UNIT;
            if (some > end - position) some = end - position;
            if (some > most) some = most;
            const size_t size = (size_t)(some * width);
            if (to_cache) {
                bytes = piece;
                running = relay_crc32c_copy(running, piece, data, size);
            }
            (values ? move_values : move_keys)(model, layer, table[position / model->block_size], first_head, heads, offset, some, bytes, width, to_cache);
            if (!to_cache) running = relay_crc32c(running, data, size);
        }
#if defined(__SSE2__)
    if (to_cache) _mm_sfence(); /* stores past the caches come in no order of their own: before anyone is told */
#endif
    *crc = running;
    return OK;
}

int relay_read_kv(const model_t *model, int layer, int first_head, int heads, const int32_t *table, int64_t first, int64_t count, uint8_t *out, uint32_t *crc)
{
    return move(model, layer, first_head, heads, table, first, count, out, 0, crc);
}

int relay_write_kv(const model_t *model, int layer, int first_head, int heads, const int32_t *table, int64_t first, int64_t count, const uint8_t *data, uint32_t *crc)
{
    return move(model, layer, first_head, heads, table, first, count, (uint8_t *)data, 1, crc);
}

void relay_copy_block(const model_t *model, int64_t source, int64_t target)
{
    memcpy(model->kv + target * model->block_bytes, model->kv + source * model->block_bytes, (size_t)model->block_bytes);
}
