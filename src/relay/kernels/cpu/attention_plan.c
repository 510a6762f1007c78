/* Cuts a step's attention into tasks: attention.h. */
#define _GNU_SOURCE
#include "attention.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const model_t *model;
    const batch_t *batch;
} context_t;

/* Rows by their block tables, so that rows with a common prefix of blocks adjoin. */
static int by_table(const void *left, const void *right, void *argument)
{
    const context_t *context = argument;
    const int a = *(const int32_t *)left, b = *(const int32_t *)right;
    const int32_t *table_a = table_of(context->batch, a), *table_b = table_of(context->batch, b);
    const int blocks_a = last_position(context->batch, a) / context->model->block_size + 1;
    const int blocks_b = last_position(context->batch, b) / context->model->block_size + 1;
    for (int i = 0; i < blocks_a && i < blocks_b; i++)
        if (table_a[i] != table_b[i]) return table_a[i] < table_b[i] ? -1 : 1;
    return blocks_a != blocks_b ? blocks_a - blocks_b : a - b;
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

static int splits_of(const batch_t *batch, int row) { return last_position(batch, row) / SPLIT + 1; }
static int tokens_of(const batch_t *batch, int row) { return batch->row_starts[row + 1] - batch->row_starts[row]; }

/* Tasks of one split of all decode rows, for every kv head. Returns the end of the tasks; `members` moves on. */
static task_t *cut_split(const model_t *model, const batch_t *batch, struct attention_plan *plan, int split, int most, int32_t *members, task_t *task)
{
    const int block = split * SPLIT / model->block_size;
    const int32_t first = (int32_t)(members - plan->members);
    int32_t count = 0;
    for (int32_t i = 0; i < plan->num_decode; i++)
        if (split < splits_of(batch, plan->decode_rows[i])) members[count++] = i;
    for (int head = 0; head < model->kv_heads; head++)
        for (int32_t begin = 0, end; begin < count; begin = end) {
            const int32_t shared = table_of(batch, plan->decode_rows[members[begin]])[block];
            for (end = begin + 1; end < count && end - begin < most; end++)
                if (table_of(batch, plan->decode_rows[members[end]])[block] != shared) break;
            *task++ = (task_t){head, -1, first + begin, first + end, split};
        }
    return task;
}

/* Every thread's share gets as many of the large tasks, which come first. */
static void deal(task_t *tasks, int64_t count, int threads)
{
    memcpy(tasks + count, tasks, (size_t)count * sizeof *tasks);
    for (int64_t thread = 0, to = 0; thread < threads; thread++)
        for (int64_t from = thread; from < count; from += threads) tasks[to++] = tasks[count + from];
}

/* Every thread's share are the tokens it has in the other ops, the longest contexts first. */
static void share_out(const pool_t *pool, task_t *tasks, int64_t num_prefill, int64_t count)
{
    for (int thread = 0; thread < pool_threads(pool); thread++) {
        int64_t left = pool_share(pool, count, thread), right = pool_share(pool, count, thread + 1);
        if (right > num_prefill) right = num_prefill;
        for (right--; left < right; left++, right--) {
            const task_t swapped = tasks[left];
            tasks[left] = tasks[right], tasks[right] = swapped;
        }
    }
}

int attention_plan(model_t *model, const batch_t *batch)
{
    const int group = model->heads / model->kv_heads, threads = pool_threads(model->pool);
    if (group > MAX_TASK_ROWS) return ERR_SHAPE;
    if (!model->plan && !(model->plan = calloc(1, sizeof *model->plan))) return ERR_MEMORY;
    struct attention_plan *plan = model->plan;
    int64_t num_decode = 0, partials = 0, work = 0, most_tasks = 0;
    int most_splits = 0;
    /* Tokens of a prefill task and sequences of a decode task shrink until every thread has several tasks. */
    int most_tokens = MAX_TASK_ROWS / group;
    while (most_tokens > 8 && (int64_t)batch->tokens * model->kv_heads < (int64_t)8 * threads * most_tokens) most_tokens = (most_tokens + 1) / 2;
    for (int row = 0; row < batch->rows; row++) {
        const int count = tokens_of(batch, row), splits = splits_of(batch, row);
        work += (int64_t)count * (last_position(batch, row) + 1) * model->heads * model->head_dim;
        if (count > 1) {
            most_tasks += (int64_t)((count + most_tokens - 1) / most_tokens) * model->kv_heads;
            continue;
        }
        num_decode++, partials += splits, most_tasks += (int64_t)splits * model->kv_heads;
        most_splits = splits > most_splits ? splits : most_splits;
    }
    int most = MAX_TASK_ROWS / group;
    while (most > 2 && partials * model->kv_heads < (int64_t)4 * threads * most) most = (most + 1) / 2;

    const int64_t task_bytes = 2 * most_tasks * (int64_t)sizeof(task_t); /* twice: to deal them out */
    if (!grow(&plan->memory, &plan->memory_bytes, task_bytes + (2 * num_decode + partials) * 4)) return ERR_MEMORY;
    if (!grow((void **)&plan->partials, &plan->partial_bytes, partials * model->heads * (model->head_dim + 16) * 4)) return ERR_MEMORY;
    plan->tasks = plan->memory;
    plan->decode_rows = (int32_t *)((char *)plan->memory + task_bytes);
    plan->first_partial = plan->decode_rows + num_decode;
    plan->members = plan->first_partial + num_decode;
    plan->num_decode = num_decode, plan->num_partials = partials, plan->work = work;

    task_t *task = plan->tasks;
    int32_t *decode = plan->decode_rows;
    for (int row = 0; row < batch->rows; row++) {
        const int first = batch->row_starts[row], last = batch->row_starts[row + 1];
        if (last - first == 1) {
            *decode++ = row;
            continue;
        }
        for (int begin = first, end; begin < last; begin = end) {
            end = last - begin > most_tokens ? begin + most_tokens : last;
            for (int head = 0; head < model->kv_heads; head++) *task++ = (task_t){head, row, begin, end, 0};
        }
    }
    const int64_t num_prefill = task - plan->tasks;
    context_t context = {model, batch};
    if (num_decode > 1) qsort_r(plan->decode_rows, (size_t)num_decode, sizeof(int32_t), by_table, &context);
    int32_t partial = 0, *members = plan->members;
    for (int64_t i = 0; i < num_decode; i++) plan->first_partial[i] = partial, partial += splits_of(batch, plan->decode_rows[i]);
    for (int split = 0; split < most_splits; split++) {
        task = cut_split(model, batch, plan, split, most, members, task);
        if (task > plan->tasks) members = plan->members + task[-1].last;
    }
    plan->num_tasks = task - plan->tasks;
    if (num_prefill == 0) deal(plan->tasks, plan->num_tasks, threads);
    else share_out(model->pool, plan->tasks, num_prefill, plan->num_tasks);
    return OK;
}

void attention_release(model_t *model)
{
    if (!model->plan) return;
    free(model->plan->memory);
    free(model->plan->partials);
    free(model->plan);
    model->plan = NULL;
}
