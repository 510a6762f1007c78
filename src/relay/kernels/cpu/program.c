/* The entry points Python calls: one call runs a range of ops. */
#include "attention.h"
#include "kv.h"
#include "program.h"
#include "vec.h"

/* Refuses a batch that would read or write outside the tables, before anything is touched. */
static int check(const model_t *model, const batch_t *batch)
{
    if (batch->rows < 0 || batch->row_starts[0] != 0 || batch->row_starts[batch->rows] != batch->tokens) return ERR_SHAPE;
    for (int row = 0; row < batch->rows; row++) {
        if (batch->row_starts[row] >= batch->row_starts[row + 1]) return ERR_SHAPE;
        if (batch->slots[row] < 0 || batch->slots[row] >= model->num_slots) return ERR_SHAPE;
        const int32_t *table = batch->block_tables + (int64_t)row * batch->max_blocks;
        for (int token = batch->row_starts[row]; token < batch->row_starts[row + 1]; token++) {
            if (token > batch->row_starts[row] && batch->positions[token] != batch->positions[token - 1] + 1) return ERR_POSITION;
            if (batch->positions[token] < 0 || batch->positions[token] >= model->max_positions) return ERR_POSITION;
            const int32_t id = batch->token_ids[token] < 0 ? model->last_tokens[batch->slots[row]] : batch->token_ids[token];
            if (id < 0 || id >= model->vocab) return ERR_TOKEN;
        }
        const int blocks = batch->positions[batch->row_starts[row + 1] - 1] / model->block_size + 1;
        if (blocks > batch->max_blocks) return ERR_BLOCK;
        for (int i = 0; i < blocks; i++)
            if (table[i] < 0 || table[i] >= model->num_blocks) return ERR_BLOCK;
    }
    for (int i = 0; i < batch->sampled; i++)
        if (batch->sampled_rows[i] < 0 || batch->sampled_rows[i] >= batch->rows) return ERR_SHAPE;
    return OK;
}

int relay_run(model_t *model, const op_t *ops, int start, int stop, const batch_t *batch)
{
    int status = check(model, batch);
    const uint64_t saved = fp_enter();
    model->planned = 0;
    for (const op_t *op = ops + start; op < ops + stop && status == OK; op++) {
        const int rows = op_rows(op, batch);
        switch (op->kind) {
        case OP_EMBED: embed(model, op, batch); break;
        case OP_RMS_NORM: rms_norm(model, op, rows); break;
        case OP_LINEAR: linear(model, op, rows); break;
        case OP_HEAD_NORM: head_norm(model, op, rows); break;
        case OP_ROPE_WRITE_KV: rope_write_kv(model, op, batch); break;
        case OP_ATTEND: status = attend(model, op, batch); break;
        case OP_SILU_MUL: silu_mul(model, op, rows); break;
        case OP_SELECT_ROWS: select_rows(model, op, batch); break;
        default: status = ERR_SHAPE;
        }
    }
    fp_leave(saved);
    return status;
}

int64_t relay_scratch_floats(int64_t widest_k, int head_dim)
{
    int64_t linear_floats = linear_scratch_floats(widest_k), attention_floats = attention_scratch_floats(head_dim);
    return ((linear_floats > attention_floats ? linear_floats : attention_floats) + 63) / 64 * 64;
}

void relay_release(model_t *model) { attention_release(model); }

/* For the test that compares the polynomial with kernels/canon.py. */
void relay_exp2(const float *x, float *y, int64_t n)
{
    const uint64_t saved = fp_enter();
    for (int64_t i = 0; i < n; i += 16) v_store_first(y + i, v_exp2(v_load_first(x + i, n - i)), n - i);
    fp_leave(saved);
}

size_t relay_sizeof(int what) { return what == 0 ? sizeof(op_t) : what == 1 ? sizeof(model_t) : sizeof(batch_t); }

/* Digest of the sources this library was built from (build.py); only named here, so that a change recompiles it. */
const char *relay_source_digest(void) { return RELAY_SOURCE_DIGEST; }
