/* y[m, n] = one fma chain over k ascending (docs/decisions/0003-canon.md), for every m by the same order.
 *
 * Few rows: the panel is widened in registers and used at once. Many rows: the panel's columns are widened once into this
 * thread's scratch and reused by all rows. Threads take columns of few rows, and rows of many: then the rows' inputs were this
 * thread's outputs and still lie in its caches. k is never split. */
#include "program.h"
#include "vec.h"
#include "widen.h"

#define FUSED_ROWS 4   /* up to here weights are widened again for every row tile */
#define CACHED_ROWS 32 /* up to here k is widened in spans of CACHED_K */
#define CACHED_K 64    /* a multiple of GROUP; 16 KiB for a panel */
#define BLOCK_FLOATS 150000 /* inputs of one work item: they stay in the second-level cache while a panel's columns pass */
#define SHARED_ROWS 56 /* for each thread, from here: what widening every panel on every thread costs is small */
#define PARALLEL_WORK 60000 /* multiply-adds below which waking threads costs more than it saves */

typedef struct {
    const model_t *model;
    const op_t *op;
    int rows;
    int64_t full_panels; /* items of four vectors; the panels after them are cut into items of `piece` vectors */
    int piece, rest_items, row_blocks;
    int threads; /* each takes a share of the columns; 1: the row blocks are what is shared, or there is one thread */
} job_t;

typedef struct {
    const float *x; /* first row of the tile */
    int64_t x_stride;
    float *y; /* first row, first column of the tile */
    int64_t y_stride;
    const float *bias; /* at the first column, or NULL */
    int accumulate;
} tile_t;

INLINE void finish_one(const tile_t *tile, int r, int column, v16 sum)
{
    float *y = tile->y + r * tile->y_stride + column;
    if (tile->bias) sum = v_add(sum, v_load(tile->bias + column));
    if (tile->accumulate) sum = v_add(sum, v_load(y));
    v_store(y, sum);
}

INLINE void finish(const tile_t *tile, const int R, const int V, v16 acc[MOST_ROWS][4])
{
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) finish_one(tile, r, 16 * v, acc[r][v]);
}

INLINE void fused_tile(const int encoding, const int R, const int V, const tile_t *tile, const void *panel, int column, int64_t k_total)
{
    v16 acc[MOST_ROWS][4], w[4];
    const float *x = tile->x;
    const int64_t stride = tile->x_stride;
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) acc[r][v] = v_zero();
    FOR_EACH_WIDENED(encoding, panel, column, V, k_total, w, k, UNROLL for (int r = 0; r < R; r++) {
        v16 xr = v_set1(x[r * stride + k]);
        UNROLL for (int v = 0; v < V; v++) acc[r][v] = v_fma(xr, w[v], acc[r][v]);
    });
    finish(tile, R, V, acc);
}

/* Weights already fp32: `w` holds V vectors for each k, `w_stride` floats apart. The chains start from zero or go on from
 * `partial`, and end in y or in `partial`: storing an fp32 sum between two runs of k changes nothing. */
typedef struct {
    const float *w;
    int64_t w_stride, first_k, last_k;
    float *partial; /* [R][V][16] */
    int starts, ends;
    const char *ahead; /* packed weights of the next span, fetched while this one is worked on: `ahead_step` bytes for each k */
    int64_t ahead_step;
} span_t;

INLINE void wide_tile(const int R, const int V, const tile_t *tile, const span_t *span)
{
    v16 acc[MOST_ROWS][4];
    const float *x = tile->x, *w = span->w;
    const int64_t stride = tile->x_stride, w_stride = span->w_stride;
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) acc[r][v] = span->starts ? v_zero() : v_load(span->partial + 16 * (r * V + v));
    const char *ahead = span->ahead;
    for (int64_t k = span->first_k; k < span->last_k; k++, w += w_stride, ahead += span->ahead_step) {
        v16 wk[4];
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + 64);
        UNROLL for (int v = 0; v < V; v++) wk[v] = v_load(w + 16 * v);
        UNROLL for (int r = 0; r < R; r++) {
            v16 xr = v_set1(x[r * stride + k]);
            UNROLL for (int v = 0; v < V; v++) acc[r][v] = v_fma(xr, wk[v], acc[r][v]);
        }
    }
    if (span->ends) {
        finish(tile, R, V, acc);
        return;
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) v_store(span->partial + 16 * (r * V + v), acc[r][v]);
}

/* The first rows of a span, half a panel wide so that scales fit the registers too: widens the panel, uses it and leaves it in
 * `wide` for the rows that follow. Widening runs beside the multiplications and costs little. */
INLINE void first_tile(const int encoding, const int R, const tile_t *tile, const span_t *span, const uint8_t *packed, const int column, float *wide)
{
    v16 acc[MOST_ROWS][2], w[4];
    const float *x = tile->x + span->first_k;
    const int64_t stride = tile->x_stride;
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < 2; v++) acc[r][v] = span->starts ? v_zero() : v_load(span->partial + 64 * r + column + 16 * v);
    FOR_EACH_WIDENED(encoding, packed, column, 2, span->last_k - span->first_k, w, k, {
        UNROLL for (int v = 0; v < 2; v++) v_store(wide + k * PANEL + column + 16 * v, w[v]);
        UNROLL for (int r = 0; r < R; r++) {
            v16 xr = v_set1(x[r * stride + k]);
            UNROLL for (int v = 0; v < 2; v++) acc[r][v] = v_fma(xr, w[v], acc[r][v]);
        }
    });
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < 2; v++) {
            if (span->ends) finish_one(tile, r, column + 16 * v, acc[r][v]);
            else v_store(span->partial + 64 * r + column + 16 * v, acc[r][v]);
        }
}

INLINE void widen_columns(const int encoding, const int V, const void *panel, int column, int64_t k_total, float *out)
{
    v16 w[4];
    FOR_EACH_WIDENED(encoding, panel, column, V, k_total, w, k,
                     UNROLL for (int v = 0; v < V; v++) v_store(out + k * 16 * V + 16 * v, w[v]););
}

/* The constants R and V reach the tiles through these switches, so each case is its own unrolled loop. */
#define NARROW(R, V) ((V) <= TILE_VECTORS(R) ? (V) : TILE_VECTORS(R))

static __attribute__((noinline)) void wide_rows(int R, int V, const tile_t *tile, const span_t *span)
{
#define CASE(R_, V_) case (R_) * 8 + (V_): if ((V_) <= TILE_VECTORS(R_)) wide_tile(R_, NARROW(R_, V_), tile, span); break;
#define ROWS(R_) CASE(R_, 1) CASE(R_, 2) CASE(R_, 4)
    switch (R * 8 + V) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if TILE_ROWS > 4
        ROWS(5) ROWS(6)
#endif
    }
#undef ROWS
#undef CASE
}

#define FUSED(NAME, ENCODING)                                                                                                \
    static __attribute__((noinline)) void NAME(int R, int V, const tile_t *tile, const void *panel, int column, int64_t k)     \
    {                                                                                                                        \
        switch (R * 8 + V) {                                                                                                 \
            FUSED_CASE(ENCODING, 1, 1) FUSED_CASE(ENCODING, 1, 2) FUSED_CASE(ENCODING, 1, 4)                                 \
            FUSED_CASE(ENCODING, 2, 1) FUSED_CASE(ENCODING, 2, 2) FUSED_CASE(ENCODING, 2, 4)                                 \
            FUSED_CASE(ENCODING, 3, 1) FUSED_CASE(ENCODING, 3, 2) FUSED_CASE(ENCODING, 3, 4)                                 \
            FUSED_CASE(ENCODING, 4, 1) FUSED_CASE(ENCODING, 4, 2) FUSED_CASE(ENCODING, 4, 4)                                 \
        }                                                                                                                    \
    }
#define FUSED_CASE(ENCODING, R_, V_)                                                                                         \
    case (R_) * 8 + (V_): if ((V_) <= TILE_VECTORS(R_)) fused_tile(ENCODING, R_, NARROW(R_, V_), tile, panel, column, k); break;
FUSED(fused_f32, ENC_F32)
FUSED(fused_bf16, ENC_BF16)
FUSED(fused_f16, ENC_F16)
FUSED(fused_q8_0, ENC_Q8_0)
FUSED(fused_q4_1, ENC_Q4_1)

#define WIDEN(NAME, ENCODING)                                                                                                \
    static __attribute__((noinline)) void NAME(int V, const void *panel, int column, int64_t k, float *out)                    \
    {                                                                                                                        \
        if (V == 4) widen_columns(ENCODING, 4, panel, column, k, out);                                                       \
        else if (V == 2) widen_columns(ENCODING, 2, panel, column, k, out);                                                  \
        else widen_columns(ENCODING, 1, panel, column, k, out);                                                              \
    }
WIDEN(widen_f32, ENC_F32)
WIDEN(widen_bf16, ENC_BF16)
WIDEN(widen_f16, ENC_F16)
WIDEN(widen_q8_0, ENC_Q8_0)
WIDEN(widen_q4_1, ENC_Q4_1)

#define FIRST(NAME, ENCODING)                                                                                                \
    static __attribute__((noinline)) void NAME(int R, const tile_t *tile, const span_t *span, const uint8_t *packed, float *wide) \
    {                                                                                                                        \
        for (int column = 0; column < PANEL; column += 32) {                                                                 \
            switch (R) {                                                                                                     \
            case 3: first_tile(ENCODING, 3, tile, span, packed, column, wide); break;                                        \
            case 4: first_tile(ENCODING, 4, tile, span, packed, column, wide); break;                                        \
            case 5: first_tile(ENCODING, 5, tile, span, packed, column, wide); break;                                        \
            case 6: first_tile(ENCODING, 6, tile, span, packed, column, wide); break;                                        \
            }                                                                                                                \
        }                                                                                                                    \
    }
#if WIDE_TILES
FIRST(first_bf16, ENC_BF16)
FIRST(first_f16, ENC_F16)
FIRST(first_q8_0, ENC_Q8_0)
FIRST(first_q4_1, ENC_Q4_1)
typedef void (*first_fn)(int, const tile_t *, const span_t *, const uint8_t *, float *);
static const first_fn first_by_encoding[] = {NULL, first_bf16, first_f16, first_q8_0, first_q4_1};
#endif

typedef void (*fused_fn)(int, int, const tile_t *, const void *, int, int64_t);
typedef void (*widen_fn)(int, const void *, int, int64_t, float *);
static const fused_fn fused_by_encoding[] = {fused_f32, fused_bf16, fused_f16, fused_q8_0, fused_q4_1};
static const widen_fn widen_by_encoding[] = {widen_f32, widen_bf16, widen_f16, widen_q8_0, widen_q4_1};

/* Largest vector step a row count allows among 4, 2, 1. */
static int step_vectors(int rows, int left)
{
    int widest = TILE_VECTORS(rows);
    int v = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    return v > widest ? widest : v;
}

/* Rows [row0, row1) times `vectors` 16-lane columns of one panel. */
static void panel_columns(const job_t *job, int64_t panel, int first_vector, int vectors, int row0, int row1, int thread)
{
    const op_t *op = job->op;
    const buffer_t src = job->model->buffers[op->src], dst = job->model->buffers[op->dst];
    const uint8_t *weights = (const uint8_t *)op->weight + panel * panel_bytes(op->encoding, op->k);
    const int rows = row1 - row0;
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int most = (rows + tiles - 1) / tiles; /* rows of the tallest tile: tiles are kept equally tall */
    float *scratch = thread_scratch(job->model, thread);
    for (int v = 0, step; v < vectors; v += step) {
        const int column = 16 * (first_vector + v);
        step = step_vectors(most, vectors - v);
        const int direct = op->encoding == ENC_F32 && step == 4;
        const int beside = WIDE_TILES && step == 4 && !direct && rows > FUSED_ROWS; /* the first tile widens for the others */
        /* Few rows: widen so much of k at a time that it stays in the first-level cache while the rows pass. */
        const int64_t span_k = rows > CACHED_ROWS || direct ? op->k : CACHED_K;
        span_t span = {.w = scratch, .w_stride = 16 * step};
        for (int64_t k = 0; k < op->k; k += span_k) {
            if (rows > FUSED_ROWS) {
                span.first_k = k;
                span.last_k = k + span_k < op->k ? k + span_k : op->k;
                span.starts = k == 0, span.ends = span.last_k == op->k;
                span.partial = scratch + CACHED_K * PANEL;
                if (direct)
                    span.w = (const float *)weights + column, span.w_stride = PANEL;
                else if (!beside)
                    widen_by_encoding[op->encoding](step, weights + panel_bytes(op->encoding, k), column, span.last_k - k, scratch);
            }
            for (int t = 0, row = row0, count; t < tiles; t++, row += count) {
                count = (row1 - row + (tiles - t) - 1) / (tiles - t);
                tile_t tile = {src.data + row * src.stride, src.stride, dst.data + row * dst.stride + panel * PANEL + column, dst.stride,
                               op->bias ? op->bias + panel * PANEL + column : NULL, op->accumulate};
                if (rows <= FUSED_ROWS) {
                    fused_by_encoding[op->encoding](count, step, &tile, weights, column, op->k);
                    continue;
                }
#if WIDE_TILES
                if (beside && t == 0) {
                    first_by_encoding[op->encoding](count, &tile, &span, weights + panel_bytes(op->encoding, k), scratch);
                    span.partial += count * step * 16;
                    continue;
                }
#endif
                span.ahead_step = t == 0 && span_k < op->k ? panel_bytes(op->encoding, GROUP) / GROUP : 0;
                span.ahead = t == 0 ? (const char *)weights + panel_bytes(op->encoding, span.last_k) : (const char *)tile.x;
                wide_rows(count, step, &tile, &span);
                span.partial += count * step * 16;
            }
            if (rows <= FUSED_ROWS) break;
        }
    }
}

/* Item `index` of one row block: every thread's share of columns has its full panels first, then its pieces. */
static int64_t column_of(const job_t *job, int64_t index)
{
    const int64_t full = job->full_panels / job->threads, rest = job->rest_items / job->threads;
    if (job->rest_items % job->threads) return index;
    const int64_t thread = index / (full + rest), own = index % (full + rest);
    return own < full ? thread * full + own : job->full_panels + thread * rest + own - full;
}

static void run_item(void *argument, long item, int thread)
{
    const job_t *job = argument;
    const int64_t all_columns = job->full_panels + job->rest_items;
    int64_t block = item / all_columns, columns = item % all_columns; /* threads that share rows: block by block */
    if (job->threads > 1) block = item % job->row_blocks, columns = column_of(job, item / job->row_blocks);
    const int row0 = (int)(job->rows * block / job->row_blocks), row1 = (int)(job->rows * (block + 1) / job->row_blocks);
    if (columns < job->full_panels) {
        panel_columns(job, columns, 0, 4, row0, row1, thread);
        return;
    }
    const int64_t vectors = (job->op->n + 15) / 16;
    const int pieces = 4 / job->piece;
    const int64_t panel = job->full_panels + (columns - job->full_panels) / pieces;
    const int first = (int)((columns - job->full_panels) % pieces) * job->piece;
    const int64_t left = vectors - (panel * 4 + first);
    panel_columns(job, panel, first, (int)(left < job->piece ? left : job->piece), row0, row1, thread);
}

void linear(const model_t *model, const op_t *op, int rows)
{
    if (rows == 0) return;
    const int64_t vectors = (op->n + 15) / 16;
    const int threads = (int64_t)rows * op->n * op->k < PARALLEL_WORK ? 1 : pool_threads(model->pool);
    const int row_shares = rows >= SHARED_ROWS * threads ? threads : 1;
    job_t job = {.model = model, .op = op, .rows = rows, .threads = threads / row_shares, .piece = 4};
    /* The last panels are cut finer, so that 9 or 15 panels share out evenly over the threads. */
    job.full_panels = vectors / 4 / job.threads * job.threads;
    const int64_t rest = vectors - job.full_panels * 4;
    if (job.threads > 1) {
        job.piece = rest <= threads ? 1 : rest <= 2 * threads ? 2 : 4;
        if (rest > 2 * threads) job.piece = rest % (2 * threads) == 0 ? 2 : 1;
    }
    job.rest_items = (int)((rest + job.piece - 1) / job.piece);
    const int64_t most_rows = BLOCK_FLOATS / op->k < 48 ? 48 : BLOCK_FLOATS / op->k, share = (rows + row_shares - 1) / row_shares;
    job.row_blocks = (int)((share + most_rows - 1) / most_rows) * row_shares;
    const long items = (long)(job.full_panels + job.rest_items) * job.row_blocks;
    if (threads == 1)
        for (long item = 0; item < items; item++) run_item(&job, item, 0);
    else
        pool_run(model->pool, run_item, &job, items);
}

int64_t linear_scratch_floats(int64_t k) { return (k > CACHED_K + CACHED_ROWS ? k : CACHED_K + CACHED_ROWS) * PANEL; }
