/* Causal attention over the paged cache in the canon's order (docs/decisions/0003-canon.md).
 *
 * A task's rows are (token, query head of one kv head's group), so every K and V vector loaded serves all of them. Tiles of 64
 * keys come outermost: K and V of a tile stay in the first-level cache while the rows pass by in register tiles. Decode cuts
 * contexts into tasks of one split each and folds afterwards; attention.h says how rows come together. */
#include "attention.h"
#include "attention_tile.h"
#include "vec.h"

#include <string.h>

#define PARALLEL_WORK 60000 /* multiply-adds below which waking threads costs more than it saves */
#define PARALLEL_FOLDS 32

typedef struct {
    const model_t *model;
    const op_t *op;
    const batch_t *batch;
} job_t;

/* One unit's K and V in the cache. */
typedef struct {
    const uint8_t *k, *v;
} unit_t;

static unit_t find_unit(const job_t *job, const int32_t *table, int head, int unit)
{
    const model_t *model = job->model;
    const int units_per_block = model->block_size / UNIT;
    const int64_t offset = ((int64_t)head * units_per_block + unit % units_per_block) * model->head_dim * UNIT * kv_element(model);
    const int64_t block = table[unit / units_per_block];
    return (unit_t){kv_keys(model, block, job->op->layer) + offset, kv_values(model, block, job->op->layer) + offset};
}

/* Finds the tile's units in the cache, and widens them where the cache is bfloat16. Units past `end` (keys some row may see) are
 * never read: their pointers repeat unit 0, and the scores are masked. The tile after it is fetched up to `next_end`. */
static keys_t find_keys(const job_t *job, const int32_t *table, int head, const state_t *s, int tile_start, int end, int next_end)
{
    const int D = job->model->head_dim, first = tile_start / UNIT;
    keys_t keys;
    for (int u = 0; u < 4; u++) {
        if ((first + u) * UNIT >= end) {
            keys.k[u] = keys.k[0], keys.v[u] = keys.v[0], keys.next_k[u] = keys.next_k[0];
            continue;
        }
        const unit_t unit = find_unit(job, table, head, first + u);
        const unit_t next = (first + u + 4) * UNIT < next_end ? find_unit(job, table, head, first + u + 4) : unit;
        keys.k[u] = (const float *)unit.k, keys.v[u] = (const float *)unit.v;
        keys.next_k[u] = (const float *)next.k;
        if (!job->model->kv_half) continue;
        float *wide_k = s->wide_k + u * UNIT * D, *wide_v = s->wide_v + u * UNIT * D;
        for (int i = 0; i < UNIT * D; i += 16) {
            FETCH(next.k + 2 * i);
            FETCH(next.v + 2 * i);
            v_store(wide_k + i, v_from_bf16((const uint16_t *)unit.k + i));
            v_store(wide_v + i, v_from_bf16((const uint16_t *)unit.v + i));
        }
        keys.k[u] = wide_k, keys.v[u] = wide_v, keys.next_k[u] = wide_k;
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

static void begin_split(const state_t *s, int rows, int D)
{
    for (int row = 0; row < rows; row++) s->m[row] = MAX_START, s->l[row] = 0.0f;
    memset(s->acc, 0, (size_t)rows * D * 4);
}

/* Rows [first, last) of the state times one tile of the cache that `table` names; no row sees `end`. */
static void tile_of_rows(const job_t *job, const int32_t *table, int head, const state_t *s, int first, int last, int start, int end)
{
    const int split_end = (start / SPLIT + 1) * SPLIT;
    keys_t keys = find_keys(job, table, head, s, start, end, end < split_end ? end : split_end);
    for (int row = first, count; row < last; row += count) {
        count = last - row < TILE_ROWS ? last - row : TILE_ROWS;
        some_rows(count, s, row, &keys, start, job->op->log2_scale, job->model->head_dim);
        memcpy(keys.next_k, keys.k, sizeof keys.k); /* one fetch is enough */
    }
}

static void take_row(const job_t *job, const task_t *task, const state_t *s, int row, int token)
{
    const model_t *model = job->model;
    const int D = model->head_dim, group = model->heads / model->kv_heads;
    const buffer_t qkv = model->buffers[BUF_QKV];
    memcpy(s->q + row * D, qkv.data + token * qkv.stride + (int64_t)task->head * group * D, (size_t)group * D * 4);
    for (int g = 0; g < group; g++) s->visible[row + g] = job->batch->positions[token] + 1;
}

static void run_prefill(const job_t *job, const task_t *task, const state_t *s)
{
    const model_t *model = job->model;
    const int D = model->head_dim, group = model->heads / model->kv_heads, rows = (task->last - task->first) * group;
    const int32_t *table = table_of(job->batch, task->row);
    const buffer_t out = model->buffers[BUF_A];
    for (int token = task->first, row = 0; token < task->last; token++, row += group) take_row(job, task, s, row, token);
    for (int row = 0; row < rows; row++) s->total_m[row] = MAX_START, s->total_l[row] = 0.0f;
    memset(s->total, 0, (size_t)rows * D * 4);
    const int end = s->visible[rows - 1]; /* rows ascend in position */
    for (int split = 0; split < end; split += SPLIT) {
        begin_split(s, rows, D);
        for (int start = split; start < end && start < split + SPLIT; start += TILE) tile_of_rows(job, table, task->head, s, 0, rows, start, end);
        for (int row = 0; row < rows; row++)
            if (s->visible[row] > split)
                fold(s->total + row * D, s->total_m + row, s->total_l + row, s->acc + row * D, s->m[row], s->l[row], job->op->log2_scale, D);
    }
    for (int row = 0; row < rows; row++)
        divide(out.data + (task->first + row / group) * out.stride + ((int64_t)task->head * group + row % group) * D,
               s->total + row * D, s->total_l[row], D);
}

static int32_t decode_row(const model_t *model, int member) { return model->plan->decode_rows[model->plan->members[member]]; }

static float *partial_of(const model_t *model, int32_t decode, int split, int head)
{
    const int64_t size = (int64_t)(model->heads / model->kv_heads) * (model->head_dim + 16);
    return model->plan->partials + ((int64_t)(model->plan->first_partial[decode] + split) * model->kv_heads + head) * size;
}

/* Whether the keys of a tile that both rows see are the same memory. */
static int same_blocks(const model_t *model, const int32_t *a, const int32_t *b, int start, int end)
{
    for (int key = start; key < end && key < start + TILE; key += UNIT)
        if (a[key / model->block_size] != b[key / model->block_size]) return 0;
    return 1;
}

static void run_decode(const job_t *job, const task_t *task, const state_t *s)
{
    const model_t *model = job->model;
    const int D = model->head_dim, group = model->heads / model->kv_heads, count = task->last - task->first;
    for (int i = 0; i < count; i++) take_row(job, task, s, i * group, job->batch->row_starts[decode_row(model, task->first + i)]);
    begin_split(s, count * group, D);
    for (int start = task->split * SPLIT; start < (task->split + 1) * SPLIT; start += TILE)
        for (int i = 0, next; i < count; i = next) {
            int end = s->visible[i * group];
            const int32_t *table = table_of(job->batch, decode_row(model, task->first + i)); /* of the row that sees most */
            for (next = i + 1; next < count; next++) {
                const int other_end = s->visible[next * group];
                const int32_t *other = table_of(job->batch, decode_row(model, task->first + next));
                if (end <= start || other_end <= start || !same_blocks(model, table, other, start, end < other_end ? end : other_end)) break;
                if (other_end > end) table = other, end = other_end;
            }
            if (end > start) tile_of_rows(job, table, task->head, s, i * group, next * group, start, end);
        }
    for (int i = 0, row = 0; i < count; i++) {
        float *partial = partial_of(model, model->plan->members[task->first + i], task->split, task->head);
        for (int g = 0; g < group; g++, row++, partial += D + 16) {
            memcpy(partial, s->acc + row * D, (size_t)D * 4);
            partial[D] = s->m[row], partial[D + 1] = s->l[row];
        }
    }
}

static void run_task(void *argument, long item, int thread)
{
    const job_t *job = argument;
    const task_t *task = &job->model->plan->tasks[item];
    const state_t s = carve(thread_scratch(job->model, thread), job->model->head_dim);
    if (task->row < 0) run_decode(job, task, &s);
    else run_prefill(job, task, &s);
}

/* The splits of one decode token and kv head, folded ascending. */
static void run_fold(void *argument, long item, int thread)
{
    const job_t *job = argument;
    const model_t *model = job->model;
    const int D = model->head_dim, group = model->heads / model->kv_heads, head = (int)(item % model->kv_heads);
    const int32_t decode = (int32_t)(item / model->kv_heads), row = model->plan->decode_rows[decode];
    const int splits = last_position(job->batch, row) / SPLIT + 1;
    const buffer_t out = model->buffers[BUF_A];
    float *total = carve(thread_scratch(model, thread), D).total;
    for (int g = 0; g < group; g++) {
        float m = MAX_START, l = 0.0f;
        memset(total, 0, (size_t)D * 4);
        for (int split = 0; split < splits; split++) {
            const float *partial = partial_of(model, decode, split, head) + g * (D + 16);
            fold(total, &m, &l, partial, partial[D], partial[D + 1], job->op->log2_scale, D);
        }
        divide(out.data + job->batch->row_starts[row] * out.stride + ((int64_t)head * group + g) * D, total, l, D);
    }
}

static void run_all(const job_t *job, job_fn fn, int64_t items, int parallel)
{
    if (parallel) pool_run(job->model->pool, fn, (void *)job, items);
    else
        for (long item = 0; item < items; item++) fn((void *)job, item, 0);
}

int attend(model_t *model, const op_t *op, const batch_t *batch)
{
    if (!model->planned) {
        const int status = attention_plan(model, batch);
        if (status != OK) return status;
        model->planned = 1;
    }
    const struct attention_plan *plan = model->plan;
    const job_t job = {model, op, batch};
    run_all(&job, run_task, plan->num_tasks, plan->work >= PARALLEL_WORK);
    run_all(&job, run_fold, plan->num_decode * model->kv_heads, plan->num_partials * model->kv_heads >= PARALLEL_FOLDS);
    return OK;
}
