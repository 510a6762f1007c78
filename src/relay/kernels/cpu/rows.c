/* Ops on single rows: embedding, norms, rotary embedding with the cache write, gated activation, row selection. */
#include "program.h"
#include "vec.h"
#include "widen.h"

#include <math.h>
#include <string.h>

#define PARALLEL_FLOATS 16384 /* floats below which waking threads costs more than it saves */

typedef struct {
    const model_t *model;
    const op_t *op;
    const batch_t *batch;
    void (*row)(const model_t *, const op_t *, const batch_t *, int row);
    int rows;
    long items;
} job_t;

static void run_item(void *argument, long item, int thread)
{
    (void)thread;
    const job_t *job = argument;
    for (long row = job->rows * item / job->items; row < job->rows * (item + 1) / job->items; row++)
        job->row(job->model, job->op, job->batch, (int)row);
}

static void for_rows(job_t job, int64_t floats_per_row)
{
    if (job.rows * floats_per_row < PARALLEL_FLOATS || pool_threads(job.model->pool) == 1) {
        for (int row = 0; row < job.rows; row++) job.row(job.model, job.op, job.batch, row);
        return;
    }
    const int64_t threads = pool_threads(job.model->pool), rows_per_item = PARALLEL_FLOATS / 4 / floats_per_row;
    job.items = job.rows / (rows_per_item < 1 ? 1 : rows_per_item);
    job.items = (job.items + threads - 1) / threads * threads; /* shares of whole items have equally many rows */
    pool_run(job.model->pool, run_item, &job, job.items);
}

static int row_of_token(const batch_t *batch, int token)
{
    int low = 0, high = batch->rows - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (batch->row_starts[middle] <= token) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* One output of a packed matrix as a row: w[n, 0..k-1]. */
static void embed_row(const model_t *model, const op_t *op, const batch_t *batch, int token)
{
    int32_t id = batch->token_ids[token];
    if (id < 0) id = model->last_tokens[batch->slots[row_of_token(batch, token)]];
    const uint8_t *panel = (const uint8_t *)op->weight + id / PANEL * panel_bytes(op->encoding, op->k);
    const int lane = id % PANEL, vector = lane / 16 * 16;
    float *out = model->buffers[op->dst].data + token * model->buffers[op->dst].stride;
    float lanes[16];
    v16 w[1];
    switch (op->encoding) {
#define PICK(ENCODING) \
    case ENCODING: FOR_EACH_WIDENED(ENCODING, panel, vector, 1, op->k, w, k, { v_store(lanes, w[0]); out[k] = lanes[lane % 16]; }); break;
        PICK(ENC_F32) PICK(ENC_BF16) PICK(ENC_F16) PICK(ENC_Q8_0) PICK(ENC_Q4_1)
    }
}

void embed(const model_t *model, const op_t *op, const batch_t *batch)
{
    for_rows((job_t){model, op, batch, embed_row, batch->tokens, 0}, op->k * 4);
}

/* y = x / sqrt(mean(x^2) + eps) * weight over n floats; y may be x. */
static void norm(const float *x, float *y, const float *weight, int64_t n, float eps)
{
    v16 squares = v_zero();
    for (int64_t i = 0; i < n; i += 16) {
        v16 a = v_load_first(x + i, n - i); /* lanes past n add 0 * 0 to sums that are never -0: exact */
        squares = v_fma(a, a, squares);
    }
    const float s = 1.0f / sqrtf(v_tree_sum(squares) / (float)n + eps);
    for (int64_t i = 0; i < n; i += 16)
        v_store_first(y + i, v_mul(v_mul(v_load_first(x + i, n - i), v_set1(s)), v_load_first(weight + i, n - i)), n - i);
}

static void rms_norm_row(const model_t *model, const op_t *op, const batch_t *batch, int row)
{
    (void)batch;
    const buffer_t src = model->buffers[op->src], dst = model->buffers[op->dst];
    norm(src.data + row * src.stride, dst.data + row * dst.stride, op->vector, op->n, op->eps);
}

void rms_norm(const model_t *model, const op_t *op, int rows)
{
    for_rows((job_t){model, op, NULL, rms_norm_row, rows, 0}, op->n);
}

static void head_norm_row(const model_t *model, const op_t *op, const batch_t *batch, int row)
{
    (void)batch;
    float *head = model->buffers[BUF_QKV].data + row * model->buffers[BUF_QKV].stride;
    for (int h = 0; h < model->heads + model->kv_heads; h++, head += model->head_dim)
        norm(head, head, h < model->heads ? op->vector : op->vector2, model->head_dim, op->eps);
}

void head_norm(const model_t *model, const op_t *op, int rows)
{
    for_rows((job_t){model, op, NULL, head_norm_row, rows, 0}, (int64_t)(model->heads + model->kv_heads) * model->head_dim);
}

static void write_kv_row(const model_t *model, int layer, int64_t block, int offset, const float *k, const float *v)
{
    const int D = model->head_dim, units = model->block_size / 16;
    for (int h = 0; h < model->kv_heads; h++, k += D, v += D) {
        const int64_t key = ((int64_t)h * units + offset / 16) * D * 16 + offset % 16;
        const int64_t value = ((int64_t)h * model->block_size + offset) * D;
        if (model->kv_half) {
            uint16_t rounded[16];
            uint16_t *keys = (uint16_t *)kv_keys(model, block, layer) + key;
            uint16_t *values = (uint16_t *)kv_values(model, block, layer) + value;
            for (int d = 0; d < D; d += 16) {
                v_store_bf16(rounded, v_load(k + d));
                for (int i = 0; i < 16; i++) keys[(d + i) * 16] = rounded[i];
                v_store_bf16(values + d, v_load(v + d));
            }
        } else {
            float *keys = (float *)kv_keys(model, block, layer) + key;
            for (int d = 0; d < D; d++) keys[d * 16] = k[d];
            memcpy((float *)kv_values(model, block, layer) + value, v, (size_t)D * 4);
        }
    }
}

static void rope_row(const model_t *model, const op_t *op, const batch_t *batch, int token)
{
    const int position = batch->positions[token], half = model->head_dim / 2;
    const float *cosines = model->rope_cos + (int64_t)position * half, *sines = model->rope_sin + (int64_t)position * half;
    float *qkv = model->buffers[BUF_QKV].data + token * model->buffers[BUF_QKV].stride;
    for (int h = 0; h < model->heads + model->kv_heads; h++) {
        float *first = qkv + h * model->head_dim, *second = first + half;
        for (int i = 0; i < half; i += 16) {
            const int left = half - i;
            v16 a = v_load_first(first + i, left), b = v_load_first(second + i, left);
            v16 c = v_load_first(cosines + i, left), s = v_load_first(sines + i, left);
            v_store_first(first + i, v_fma(a, c, v_neg(v_mul(b, s))), left);
            v_store_first(second + i, v_fma(b, c, v_mul(a, s)), left);
        }
    }
    const int32_t *table = batch->block_tables + (int64_t)row_of_token(batch, token) * batch->max_blocks;
    const float *k = qkv + (int64_t)model->heads * model->head_dim;
    write_kv_row(model, op->layer, table[position / model->block_size], position % model->block_size, k,
                 k + (int64_t)model->kv_heads * model->head_dim);
}

void rope_write_kv(const model_t *model, const op_t *op, const batch_t *batch)
{
    for_rows((job_t){model, op, batch, rope_row, batch->tokens, 0}, (int64_t)(model->heads + 4 * model->kv_heads) * model->head_dim);
}

static void silu_mul_row(const model_t *model, const op_t *op, const batch_t *batch, int row)
{
    (void)op, (void)batch;
    const int64_t n = model->intermediate;
    const float *gate = model->buffers[BUF_G].data + row * model->buffers[BUF_G].stride, *up = gate + n;
    float *out = model->buffers[BUF_U].data + row * model->buffers[BUF_U].stride;
    for (int64_t i = 0; i < n; i += 16) {
        v16 g = v_load_first(gate + i, n - i);
        v16 e = v_exp2(v_mul(v_neg(g), v_set1(0x1.715476p+0f)));
        v_store_first(out + i, v_mul(v_div(g, v_add(v_set1(1.0f), e)), v_load_first(up + i, n - i)), n - i);
    }
}

void silu_mul(const model_t *model, const op_t *op, int rows)
{
    for_rows((job_t){model, op, NULL, silu_mul_row, rows, 0}, (int64_t)model->intermediate * 3);
}

void select_rows(const model_t *model, const op_t *op, const batch_t *batch)
{
    const buffer_t src = model->buffers[op->src], dst = model->buffers[op->dst];
    for (int i = 0; i < batch->sampled; i++) {
        int token = batch->row_starts[batch->sampled_rows[i] + 1] - 1;
        memcpy(dst.data + i * dst.stride, src.data + token * src.stride, (size_t)src.stride * 4);
    }
}
