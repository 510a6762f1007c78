/* How a step's attention is cut into tasks (attention_plan.c) for the threads that compute it (attention.c). */
#ifndef RELAY_ATTENTION_H
#define RELAY_ATTENTION_H

#include "program.h"

#define UNIT 16
#define TILE 64
#define SPLIT 256
#define MAX_TASK_ROWS 192

/* Rows of a step with several tokens (prefill) are cut by tokens, all splits in one task. Rows with one token (decode) are cut
 * by splits, and rows whose tables name the same blocks there share a task, so that each tile is loaded once for all of them. */
typedef struct {
    int32_t head;        /* kv head */
    int32_t row;         /* prefill: sequence row of the batch; decode: -1 */
    int32_t first, last; /* prefill: tokens of the step; decode: members of the plan */
    int32_t split;       /* decode only */
} task_t;

/* Depends on the batch alone, so one plan serves all layers of a run. */
struct attention_plan {
    task_t *tasks;
    int64_t num_tasks, num_decode, num_partials, work; /* work: multiply-adds of scores, to judge whether threads pay */
    int32_t *decode_rows;   /* [num_decode] rows of the batch with one token; those with a common prefix of blocks adjoin */
    int32_t *first_partial; /* [num_decode] the splits of decode_rows[i] keep their states at first_partial[i] + split */
    int32_t *members;       /* indices into decode_rows, what tasks point to */
    float *partials;        /* [num_partials][kv_heads][group][head_dim + 16] */
    void *memory;
    int64_t memory_bytes, partial_bytes;
};

/* Makes the plan of `batch` in model->plan. OK, ERR_SHAPE or ERR_MEMORY. */
int attention_plan(model_t *model, const batch_t *batch);
void attention_release(model_t *model);

static inline int32_t last_position(const batch_t *batch, int row) { return batch->positions[batch->row_starts[row + 1] - 1]; }
static inline const int32_t *table_of(const batch_t *batch, int row) { return batch->block_tables + (int64_t)row * batch->max_blocks; }

#endif
