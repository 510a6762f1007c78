/* What the machine can do, measured with the kernels' own vectors, for the benchmark's share of peak. */
#include "program.h"
#include "vec.h"

typedef struct {
    const float *data;
    int64_t floats;
    float sink[64][16];
} job_t;

static void fma_item(void *argument, long item, int thread)
{
    (void)item;
    job_t *job = argument;
    static const float lanes[32] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28};
    v16 acc[12], x = v_set1(0.999f), y = v_set1(0.001f);
    UNROLL for (int i = 0; i < 12; i++) acc[i] = v_load(lanes + i); /* all lanes differ, or a compiler computes one for two */
    for (int n = 0; n < 20000; n++) UNROLL for (int i = 0; i < 12; i++) acc[i] = v_fma(acc[i], x, y);
    UNROLL for (int i = 1; i < 12; i++) acc[0] = v_add(acc[0], acc[i]);
    v_store(job->sink[thread % 64], acc[0]);
}

static void sum_item(void *argument, long item, int thread)
{
    job_t *job = argument;
    const float *p = job->data + item * 16384;
    v16 acc[4];
    UNROLL for (int i = 0; i < 4; i++) acc[i] = v_zero();
    for (int n = 0; n < 16384; n += 64) {
        __builtin_prefetch(p + n + 1024);
        __builtin_prefetch(p + n + 1040);
        __builtin_prefetch(p + n + 1056);
        __builtin_prefetch(p + n + 1072);
        UNROLL for (int i = 0; i < 4; i++) acc[i] = v_add(acc[i], v_load(p + n + 16 * i));
    }
    v_store(job->sink[thread % 64], v_add(v_add(acc[0], acc[1]), v_add(acc[2], acc[3])));
}

/* One round of 20,000 * 12 * 16 multiply-adds for each of `items`. */
void relay_measure_fma(pool_t *pool, int64_t items)
{
    job_t job = {0};
    pool_run(pool, fma_item, &job, items);
}

/* Reads `floats` (a multiple of 16,384) once. */
void relay_measure_read(pool_t *pool, const float *data, int64_t floats)
{
    job_t job = {.data = data, .floats = floats};
    pool_run(pool, sum_item, &job, floats / 16384);
}
