/* The records a program is made of. kernels/cpu/records.py mirrors these structs field by field. */
#ifndef RELAY_PROGRAM_H
#define RELAY_PROGRAM_H

#include <stddef.h>
#include <stdint.h>

#include "pool.h"

enum { OP_EMBED, OP_RMS_NORM, OP_LINEAR, OP_HEAD_NORM, OP_ROPE_WRITE_KV, OP_ATTEND, OP_SILU_MUL, OP_SELECT_ROWS };
enum { BUF_X, BUF_H, BUF_QKV, BUF_A, BUF_G, BUF_U, BUF_S, BUF_L, BUFFERS };
enum { ENC_F32, ENC_BF16, ENC_F16, ENC_Q8_0, ENC_Q4_1 };

/* Run-time errors of relay_run; kernels/cpu/backend.py holds their texts. */
enum { OK, ERR_TOKEN = 1, ERR_POSITION = 2, ERR_BLOCK = 3, ERR_SHAPE = 4, ERR_MEMORY = 5 };

typedef struct {
    float *data; /* [rows][stride]; stride is the width rounded up to 16, so whole vectors may be stored */
    int64_t stride;
} buffer_t;

typedef struct {
    int32_t kind, src, dst, encoding;
    int32_t accumulate, layer;
    int64_t n, k;
    const void *weight;     /* packed matrix of Linear and Embed */
    const float *bias;      /* padded to 16, or NULL */
    const float *vector;    /* norm weight; q norm of HeadNorm */
    const float *vector2;   /* k norm of HeadNorm */
    float eps;
    float log2_scale;       /* Attend: fp32(scale * log2 e) */
} op_t;

typedef struct {
    int32_t hidden, intermediate, heads, kv_heads, head_dim, vocab, max_positions, num_layers;
    buffer_t buffers[BUFFERS];
    const float *rope_cos, *rope_sin; /* [max_positions][head_dim / 2] */
    /* Cache: [block][layer] of { K [kv_head][unit][dim][16]; V [kv_head][token][dim] }. */
    uint8_t *kv;
    int64_t block_bytes, layer_bytes;
    int32_t block_size, num_blocks, kv_half; /* kv_half: bfloat16 instead of float32 */
    int32_t num_slots;
    const int32_t *last_tokens; /* by slot */
    pool_t *pool;
    float *scratch; /* scratch_floats for every thread */
    int64_t scratch_floats;
    struct attention_plan *plan; /* owned by attention_plan.c, grown as needed */
    int32_t planned;             /* whether `plan` is of the batch now running */
} model_t;

typedef struct {
    int32_t tokens, rows, sampled, max_blocks;
    const int32_t *token_ids, *positions, *row_starts, *slots, *block_tables, *sampled_rows;
} batch_t;

static inline float *thread_scratch(const model_t *model, int thread) { return model->scratch + thread * model->scratch_floats; }
static inline uint8_t *kv_keys(const model_t *model, int64_t block, int layer)
{
    return model->kv + block * model->block_bytes + layer * model->layer_bytes;
}
static inline uint8_t *kv_values(const model_t *model, int64_t block, int layer)
{
    return kv_keys(model, block, layer) + model->layer_bytes / 2;
}
static inline int kv_element(const model_t *model) { return model->kv_half ? 2 : 4; }
static inline int op_rows(const op_t *op, const batch_t *batch) { return op->src >= BUF_S || op->dst >= BUF_S ? batch->sampled : batch->tokens; }

void linear(const model_t *model, const op_t *op, int rows);
int64_t linear_scratch_floats(int64_t k);
void embed(const model_t *model, const op_t *op, const batch_t *batch);
void rms_norm(const model_t *model, const op_t *op, int rows);
void head_norm(const model_t *model, const op_t *op, int rows);
void rope_write_kv(const model_t *model, const op_t *op, const batch_t *batch);
void silu_mul(const model_t *model, const op_t *op, int rows);
void select_rows(const model_t *model, const op_t *op, const batch_t *batch);
int attend(model_t *model, const op_t *op, const batch_t *batch);
int64_t attention_scratch_floats(int head_dim);

#endif
