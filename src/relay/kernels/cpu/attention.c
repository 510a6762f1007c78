/* Causal attention over the paged cache in the canon's order (docs/decisions/0003-canon.md).
 *
 * A task is a run of tokens of one sequence and one kv head; its rows are (token, query head of the group), so every K and V
 * vector loaded serves all of them. Tiles of 64 keys come outermost: K and V of a tile stay in the first-level cache while
 * the rows pass by in register tiles. Decode cuts a long context into tasks of one split each and folds afterwards. */
#include "program.h"
#include "vec.h"

#include <stdlib.h>
#include <string.h>

#define UNIT 16
#define TILE 64
#define SPLIT 256
#define MAX_START (-1e30f)
#define MAX_TASK_ROWS 192
#define PARALLEL_WORK 60000 /* multiply-adds below which waking threads costs more than it saves */

typedef struct {
    int32_t row, head;     /* sequence row of the batch; kv head */
    int32_t first, last;   /* tokens of the step [first, last) */
    int32_t split;         /* -1: all splits, folded here */
    int32_t splits;        /* of a decode task's context */
    int64_t partial;       /* where a decode task's split state goes, in floats */
} task_t;

typedef struct {
    const model_t *model;
    const op_t *op;
    const batch_t *batch;
    const task_t *tasks;
    const task_t *folds;
} job_t;

/* Memory of one task: everything is [row], or [row][dim]. `m, l, acc` belong to the split, the others to the fold. */
typedef struct {
    float *q, *acc, *total, *m, *l, *total_m, *total_l;
    int32_t *visible; /* keys the row may see: position + 1 */
    float *p;         /* [TILE_ROWS][64] scores, then weights */
    float *wide_k, *wide_v;
} state_t;

static state_t carve(float *memory, int D)
{
    state_t s;
    s.q = memory, memory += MAX_TASK_ROWS * D;
    s.acc = memory, memory += MAX_TASK_ROWS * D;
    s.total = memory, memory += MAX_TASK_ROWS * D;
    s.m = memory, memory += MAX_TASK_ROWS;
    s.l = memory, memory += MAX_TASK_ROWS;
    s.total_m = memory, memory += MAX_TASK_ROWS;
    s.total_l = memory, memory += MAX_TASK_ROWS;
    s.visible = (int32_t *)memory, memory += MAX_TASK_ROWS;
    s.p = memory, memory += 8 * TILE;
    s.wide_k = memory, memory += TILE * D;
    s.wide_v = memory;
    return s;
}

int64_t attention_scratch_floats(int D) { return (int64_t)MAX_TASK_ROWS * (3 * D + 5) + 8 * TILE + 2 * TILE * D; }

/* One tile of keys: four units of K [dim][16] and of V [16][dim]. */
typedef struct {
    const float *k[4], *v[4];
} keys_t;

/* p[r][key] = chain over the head dimension of q[r] * k[key]. */
INLINE void score_tile(const int R, const int V, const float *q, const float *const *k, float *p, int D)
{
    v16 acc[MOST_ROWS][4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) acc[r][v] = v_zero();
    for (int d = 0; d < D; d++) {
        v16 kd[4];
        UNROLL for (int v = 0; v < V; v++) kd[v] = v_load(k[v] + d * UNIT);
        UNROLL for (int r = 0; r < R; r++) {
            v16 qd = v_set1(q[r * D + d]);
            UNROLL for (int v = 0; v < V; v++) acc[r][v] = v_fma(qd, kd[v], acc[r][v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) v_store(p + r * TILE + v * UNIT, acc[r][v]);
}

/* acc[r] = acc[r] * scale[r], then fma(p[r][key], v[key], acc[r]) for the first `count` keys ascending. */
INLINE void value_tile(const int R, const int V, const float *p, const float *const *values, int count, const float *scale, float *out, int D)
{
    v16 acc[MOST_ROWS][4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) acc[r][v] = v_mul(v_load(out + r * D + 16 * v), v_set1(scale[r]));
    for (int unit = 0; unit * UNIT < count; unit++) {
        const float *row = values[unit];
        const float *weight = p + unit * UNIT;
        const int left = count - unit * UNIT < UNIT ? count - unit * UNIT : UNIT;
        for (int key = 0; key < left; key++, row += D, weight++) {
            v16 x[4];
            UNROLL for (int v = 0; v < V; v++) x[v] = v_load(row + 16 * v);
            UNROLL for (int r = 0; r < R; r++) {
                v16 pr = v_set1(weight[r * TILE]);
                UNROLL for (int v = 0; v < V; v++) acc[r][v] = v_fma(pr, x[v], acc[r][v]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) v_store(out + r * D + 16 * v, acc[r][v]);
}

/* Scores to weights: updates m and l of R rows and gives the scale their accumulators need. */
INLINE void soften(const int R, float *p, float *m, float *l, const int32_t *visible, int tile_start, float c, float *scale)
{
    float before[16], after[16];
    UNROLL for (int r = 0; r < R; r++) {
        const int left = visible[r] - tile_start;
        v16 best = v_set1(MAX_START);
        UNROLL for (int u = 0; u < 4; u++) best = v_max(best, v_first(v_load(p + r * TILE + u * UNIT), v_set1(MAX_START), left - u * UNIT));
        float high = v_max_lane(best);
        before[r] = m[r];
        after[r] = m[r] > high ? m[r] : high;
    }
    UNROLL for (int r = R; r < 16; r++) before[r] = after[r] = 0.0f;
    float a[16];
    v_store(a, v_exp2(v_mul(v_sub(v_load(before), v_load(after)), v_set1(c))));
    UNROLL for (int r = 0; r < R; r++) {
        const int left = visible[r] - tile_start;
        const v16 shift = v_set1(-(after[r] * c));
        v16 sum = v_zero();
        UNROLL for (int u = 0; u < 4; u++) {
            v16 s = v_exp2(v_fma(v_load(p + r * TILE + u * UNIT), v_set1(c), shift));
            s = v_first(s, v_zero(), left - u * UNIT);
            v_store(p + r * TILE + u * UNIT, s);
            sum = v_add(sum, s);
        }
        l[r] = f_fma(l[r], a[r], v_tree_sum(sum));
        m[r] = after[r];
        scale[r] = a[r];
    }
}

INLINE void rows_of_tile(const int R, const state_t *s, int row, const keys_t *keys, int tile_start, int count, float c, int D)
{
    float scale[MOST_ROWS];
    const int V = TILE_VECTORS(R);
    if (V == 4 && count <= 2 * UNIT) /* the diagonal: two units hold every key these rows see, the other scores are masked */
        score_tile(R, 2, s->q + row * D, keys->k, s->p, D);
    else
        UNROLL for (int u = 0; u < 4; u += V)
            if (u * UNIT < count) score_tile(R, V, s->q + row * D, keys->k + u, s->p + u * UNIT, D);
    soften(R, s->p, s->m + row, s->l + row, s->visible + row, tile_start, c, scale);
    int d = 0;
    for (; d + 16 * V <= D; d += 16 * V) {
        const float *v[4] = {keys->v[0] + d, keys->v[1] + d, keys->v[2] + d, keys->v[3] + d};
        value_tile(R, V, s->p, v, count, scale, s->acc + row * D + d, D);
    }
    for (; d < D; d += 16) {
        const float *v[4] = {keys->v[0] + d, keys->v[1] + d, keys->v[2] + d, keys->v[3] + d};
        value_tile(R, 1, s->p, v, count, scale, s->acc + row * D + d, D);
    }
}

static __attribute__((noinline)) void some_rows(int R, const state_t *s, int row, const keys_t *keys, int tile_start, int count, float c, int D)
{
    switch (R) {
    case 1: rows_of_tile(1, s, row, keys, tile_start, count, c, D); break;
    case 2: rows_of_tile(2, s, row, keys, tile_start, count, c, D); break;
    case 3: rows_of_tile(3, s, row, keys, tile_start, count, c, D); break;
    case 4: rows_of_tile(4, s, row, keys, tile_start, count, c, D); break;
#if TILE_ROWS > 4
    case 5: rows_of_tile(5, s, row, keys, tile_start, count, c, D); break;
    case 6: rows_of_tile(6, s, row, keys, tile_start, count, c, D); break;
#endif
    }
}

/* Finds the tile's units in the cache, and widens them where the cache is bfloat16. Units past `end` (keys some row of the
 * task may see) are never read: their pointers repeat unit 0, and the scores are masked. */
static keys_t find_keys(const job_t *job, const task_t *task, const state_t *s, int tile_start, int end)
{
    const model_t *model = job->model;
    const int D = model->head_dim, units_per_block = model->block_size / UNIT, element = kv_element(model);
    const int32_t *table = job->batch->block_tables + (int64_t)task->row * job->batch->max_blocks;
    keys_t keys;
    for (int u = 0; u < 4; u++) {
        int unit = tile_start / UNIT + u;
        if (unit * UNIT >= end) {
            keys.k[u] = keys.k[0], keys.v[u] = keys.v[0];
            continue;
        }
        const int64_t block = table[unit / units_per_block];
        const int64_t offset = ((int64_t)task->head * units_per_block + unit % units_per_block) * D * UNIT * element;
        const uint8_t *k = kv_keys(model, block, job->op->layer) + offset, *v = kv_values(model, block, job->op->layer) + offset;
        if (!model->kv_half) {
            keys.k[u] = (const float *)k, keys.v[u] = (const float *)v;
            continue;
        }
        float *wide_k = s->wide_k + u * UNIT * D, *wide_v = s->wide_v + u * UNIT * D;
        for (int i = 0; i < UNIT * D; i += 16) {
            v_store(wide_k + i, v_from_bf16((const uint16_t *)k + i));
            v_store(wide_v + i, v_from_bf16((const uint16_t *)v + i));
        }
        keys.k[u] = wide_k, keys.v[u] = wide_v;
    }
    return keys;
}

/* total = total (+) split, the canon's fold. */
static void fold(float *total, float *total_m, float *total_l, const float *acc, float m, float l, float c, int D)
{
    const float high = *total_m > m ? *total_m : m;
    float w[16] = {*total_m - high, m - high};
    v_store(w, v_exp2(v_mul(v_load(w), v_set1(c))));
    for (int d = 0; d < D; d += 16)
        v_store(total + d, v_fma(v_load(acc + d), v_set1(w[1]), v_mul(v_load(total + d), v_set1(w[0]))));
    *total_l = f_fma(l, w[1], *total_l * w[0]);
    *total_m = high;
}

/* out = total / l; adding +0 makes every zero +0, whichever way a multiplication by an invisible key's 0 signed it. */
static void divide(float *out, const float *total, float l, int D)
{
    for (int d = 0; d < D; d += 16) v_store(out + d, v_add(v_div(v_load(total + d), v_set1(l)), v_zero()));
}

static void run_split(const job_t *job, const task_t *task, const state_t *s, int rows, int split)
{
    const int D = job->model->head_dim;
    const int end = s->visible[rows - 1];
    const float c = job->op->log2_scale;
    for (int row = 0; row < rows; row++) s->m[row] = MAX_START, s->l[row] = 0.0f;
    memset(s->acc, 0, (size_t)rows * D * 4);
    for (int start = split * SPLIT; start < end && start < (split + 1) * SPLIT; start += TILE) {
        const keys_t keys = find_keys(job, task, s, start, end);
        for (int row = 0, count; row < rows; row += count) {
            count = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
            int visible = s->visible[row + count - 1] - start; /* rows ascend in position */
            if (visible > 0) some_rows(count, s, row, &keys, start, visible < TILE ? visible : TILE, c, D);
        }
    }
}

static void run_task(void *argument, long item, int thread)
{
    const job_t *job = argument;
    const task_t *task = &job->tasks[item];
    const model_t *model = job->model;
    const int D = model->head_dim, group = model->heads / model->kv_heads, rows = (task->last - task->first) * group;
    const state_t s = carve(thread_scratch(model, thread), D);
    const buffer_t qkv = model->buffers[BUF_QKV], out = model->buffers[BUF_A];
    for (int token = task->first, row = 0; token < task->last; token++, row += group) {
        memcpy(s.q + row * D, qkv.data + token * qkv.stride + (int64_t)task->head * group * D, (size_t)group * D * 4);
        for (int g = 0; g < group; g++) s.visible[row + g] = job->batch->positions[token] + 1;
    }
    if (task->split >= 0) {
        float *partial = model->partials + task->partial;
        run_split(job, task, &s, rows, task->split);
        for (int row = 0; row < rows; row++, partial += D + 16) {
            memcpy(partial, s.acc + row * D, (size_t)D * 4);
            partial[D] = s.m[row], partial[D + 1] = s.l[row];
        }
        return;
    }
    for (int row = 0; row < rows; row++) s.total_m[row] = MAX_START, s.total_l[row] = 0.0f;
    memset(s.total, 0, (size_t)rows * D * 4);
    for (int split = 0; split * SPLIT < s.visible[rows - 1]; split++) {
        run_split(job, task, &s, rows, split);
        for (int row = 0; row < rows; row++)
            if (s.visible[row] > split * SPLIT)
                fold(s.total + row * D, s.total_m + row, s.total_l + row, s.acc + row * D, s.m[row], s.l[row], job->op->log2_scale, D);
    }
    for (int row = 0; row < rows; row++)
        divide(out.data + (task->first + row / group) * out.stride + ((int64_t)task->head * group + row % group) * D,
               s.total + row * D, s.total_l[row], D);
}

/* The splits of one decode token and kv head, folded ascending. */
static void run_fold(void *argument, long item, int thread)
{
    const job_t *job = argument;
    const task_t *task = &job->folds[item];
    const model_t *model = job->model;
    const int D = model->head_dim, group = model->heads / model->kv_heads;
    float *total = carve(thread_scratch(model, thread), D).total;
    for (int g = 0; g < group; g++) {
        float m = MAX_START, l = 0.0f;
        memset(total, 0, (size_t)D * 4);
        for (int split = 0; split < task->splits; split++) {
            const float *partial = model->partials + task->partial + ((int64_t)split * group + g) * (D + 16);
            fold(total, &m, &l, partial, partial[D], partial[D + 1], job->op->log2_scale, D);
        }
        divide(model->buffers[BUF_A].data + task->first * model->buffers[BUF_A].stride + ((int64_t)task->head * group + g) * D, total, l, D);
    }
}

static int grow(void **memory, int64_t *have, int64_t need)
{
    if (*have >= need) return 1;
    free(*memory);
    *have = 0;
    need += need / 2;
    if (!(*memory = aligned_alloc(64, (size_t)(need + 63) / 64 * 64))) return 0;
    *have = need;
    return 1;
}

int attend(model_t *model, const op_t *op, const batch_t *batch)
{
    const int group = model->heads / model->kv_heads, threads = pool_threads(model->pool);
    if (group > MAX_TASK_ROWS) return ERR_SHAPE;
    /* Sizes: tokens of a prefill task shrink until every thread has several tasks. */
    int most_tokens = MAX_TASK_ROWS / group;
    while (most_tokens > 8 && (int64_t)batch->tokens * model->kv_heads < (int64_t)4 * threads * most_tokens) most_tokens = (most_tokens + 1) / 2;
    int64_t num_tasks = 0, num_folds = 0, partial = 0, work = 0;
    for (int row = 0; row < batch->rows; row++) {
        const int count = batch->row_starts[row + 1] - batch->row_starts[row];
        const int end = batch->positions[batch->row_starts[row + 1] - 1] + 1;
        const int splits = (end + SPLIT - 1) / SPLIT;
        if (count == 1 && splits > 1) num_tasks += (int64_t)splits * model->kv_heads, num_folds += model->kv_heads;
        else num_tasks += (int64_t)((count + most_tokens - 1) / most_tokens) * model->kv_heads;
        work += (int64_t)count * end * model->heads * model->head_dim;
    }
    if (!grow(&model->tasks, &model->task_bytes, (num_tasks + num_folds) * (int64_t)sizeof(task_t))) return ERR_MEMORY;
    task_t *task = model->tasks, *fold_task = task + num_tasks;
    for (int row = 0; row < batch->rows; row++) {
        const int first = batch->row_starts[row], last = batch->row_starts[row + 1];
        const int splits = (batch->positions[last - 1] + SPLIT) / SPLIT;
        for (int head = 0; head < model->kv_heads; head++) {
            if (last - first == 1 && splits > 1) {
                *fold_task++ = (task_t){row, head, first, last, 0, splits, partial};
                for (int split = 0; split < splits; split++, partial += (int64_t)group * (model->head_dim + 16))
                    *task++ = (task_t){row, head, first, last, split, splits, partial};
                continue;
            }
            for (int end = last; end > first; end -= most_tokens) /* the longest contexts first */
                *task++ = (task_t){row, head, end - most_tokens > first ? end - most_tokens : first, end, -1, splits, 0};
        }
    }
    int64_t bytes = model->partial_floats * 4;
    if (!grow((void **)&model->partials, &bytes, partial * 4)) return ERR_MEMORY;
    model->partial_floats = bytes / 4;
    job_t job = {model, op, batch, model->tasks, (task_t *)model->tasks + num_tasks};
    if (work < PARALLEL_WORK) {
        for (long i = 0; i < num_tasks; i++) run_task(&job, i, 0);
        for (long i = 0; i < num_folds; i++) run_fold(&job, i, 0);
    } else {
        pool_run(model->pool, run_task, &job, num_tasks);
        if (num_folds < 64)
            for (long i = 0; i < num_folds; i++) run_fold(&job, i, 0);
        else
            pool_run(model->pool, run_fold, &job, num_folds);
    }
    return OK;
}
