/* The sampler in C: bit for bit what kernels/sampler.py draws, without its sorts and full-vocabulary passes.
 *
 * One row is one call; rows share nothing, so threads may take them in any order. What is skipped is only what provably cannot
 * be chosen: blocks of 64 tokens whose best value is under a bound. All comparisons are on the canonical fp64 values.
 * Compile with -ffp-contract=off, without -ffast-math. */
#include "pool.h"
#include "sampler_filter.h"

#include <float.h>
#include <math.h>
#include <stddef.h>

typedef struct { /* mirrored by _Draw in sampler.py */
    double temperature, top_p, min_p, repetition, frequency, presence;
    const int32_t *seen_ids, *output_counts; /* [num_seen] */
    const int32_t *bias_ids;                 /* [num_bias] */
    const double *bias_values;
    const int32_t *masked_ids; /* [num_masked]; empty once min_tokens are reached */
    uint64_t seed;
    uint32_t position, choice;
    int32_t top_k, num_logprobs; /* num_logprobs < 0: none wanted */
    int32_t num_seen, num_bias, num_masked, has_penalties;
} relay_draw;

enum { DRAWN = 0, BAD_LOGIT = 1, NOTHING_LEFT = 2, OVERFLOW_ADJUSTED = 3, OVERFLOW_SCALED = 4 };

/* Bytes of scratch memory a draw over ``vocab`` tokens needs, 64-byte aligned. */
int64_t relay_sample_scratch_bytes(int32_t vocab) {
    int64_t padded = ((int64_t)vocab + BLOCK - 1) / BLOCK * BLOCK;
    return (padded * (8 + 8 + 8 + 4 + 8 + 8) + padded / BLOCK * 8 + 63) / 64 * 64;
}

static scratch carve(void *memory, int32_t vocab) {
    scratch s;
    int64_t blocks = ((int64_t)vocab + BLOCK - 1) / BLOCK, padded = blocks * BLOCK;
    s.vocab = vocab;
    s.blocks = (int32_t)blocks;
    s.z = memory;
    s.w = (int64_t *)(s.z + padded);
    s.zs = (double *)(s.w + padded);
    s.select = s.zs + padded;
    s.select_w = (int64_t *)(s.select + padded);
    s.ids = (int32_t *)(s.select_w + padded);
    s.maxima = (double *)(s.ids + padded);
    return s;
}

/* Highest of fp32 logits [n] into *best; returns whether all are below +inf and none is NaN. */
static int highest(const float *x, int32_t n, float *best) {
    float m[64];
    int32_t bad[64];
    for (int j = 0; j < 64; j++) m[j] = -INFINITY, bad[j] = 0;
    int32_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (int j = 0; j < 64; j++) {
            float v = x[i + j];
            m[j] = v > m[j] ? v : m[j];
            bad[j] |= !(v <= FLT_MAX);
        }
    for (; i < n; i++) {
        m[0] = x[i] > m[0] ? x[i] : m[0];
        bad[0] |= !(x[i] <= FLT_MAX);
    }
    int32_t any = 0;
    for (int j = 0; j < 64; j++) {
        m[0] = m[j] > m[0] ? m[j] : m[0];
        any |= bad[j];
    }
    *best = m[0];
    return !any;
}

static int32_t first_equal(const float *x, int32_t n, float value) {
    int32_t i = 0;
    for (; i + 64 <= n; i += 64) {
        int32_t any = 0;
        for (int j = 0; j < 64; j++) any |= x[i + j] == value;
        if (any) break;
    }
    while (x[i] != value) i++;
    return i;
}

/* s->z = logits with penalties, bias and mask applied. Returns DRAWN or OVERFLOW_ADJUSTED. */
static int adjust(const float *logits, const relay_draw *d, scratch *s) {
    int32_t n = s->vocab;
    int overflow = 0;
    for (int32_t i = 0; i < n; i++) s->z[i] = (double)logits[i];
    for (int32_t i = n; i < s->blocks * BLOCK; i++) s->z[i] = -INFINITY;
    for (int32_t i = 0; d->has_penalties && i < d->num_seen; i++) {
        int32_t id = d->seen_ids[i];
        if (id < 0 || id >= n) continue;
        double v = s->z[id];
        v = v > 0 ? v / d->repetition : v * d->repetition;
        v = v - d->frequency * (double)d->output_counts[i];
        if (d->output_counts[i] > 0) v = v - d->presence;
        s->z[id] = v;
    }
    for (int32_t i = 0; i < d->num_bias; i++)
        if (d->bias_ids[i] >= 0 && d->bias_ids[i] < n) s->z[d->bias_ids[i]] = s->z[d->bias_ids[i]] + d->bias_values[i];
    for (int32_t i = 0; i < d->num_masked; i++)
        if (d->masked_ids[i] >= 0 && d->masked_ids[i] < n) s->z[d->masked_ids[i]] = -INFINITY;
    for (int32_t i = 0; d->has_penalties && i < d->num_seen; i++)
        if (d->seen_ids[i] >= 0 && d->seen_ids[i] < n) overflow |= !(s->z[d->seen_ids[i]] <= DBL_MAX);
    for (int32_t i = 0; i < d->num_bias; i++)
        if (d->bias_ids[i] >= 0 && d->bias_ids[i] < n) overflow |= !(s->z[d->bias_ids[i]] <= DBL_MAX);
    return overflow ? OVERFLOW_ADJUSTED : DRAWN;
}

static int32_t first_value(const scratch *s, double value) {
    int32_t b = 0;
    while (s->maxima[b] != value) b++;
    int32_t i = b * BLOCK;
    while (s->z[i] != value) i++;
    return i;
}

/* Update (*score, *token) with 64 candidates in ascending id order; candidates past n are ignored. */
static void best_of_block(const double *z, const int32_t *ids, int32_t n, const relay_draw *d, double *score, int32_t *token) {
    uint32_t words[BLOCK];
    double scores[BLOCK];
    philox_block(ids, d->position, d->choice, d->seed, words);
    for (int i = 0; i < BLOCK; i++) scores[i] = z[i] + sm_gumbel(words[i]);
    for (int i = 0; i < n; i++) {
        if (scores[i] > *score || (scores[i] == *score && ids[i] < *token)) *score = scores[i], *token = ids[i];
    }
}

/* Highest value plus noise among all tokens (survivors < 0) or the gathered ones. */
static int32_t draw_noisy(scratch *s, const relay_draw *d, double best, int32_t survivors) {
    int32_t token;
    double score;
    if (survivors >= 0) {
        score = -INFINITY, token = INT32_MAX;
        for (int32_t i = 0; i < survivors; i += BLOCK) {
            int32_t n = survivors - i < BLOCK ? survivors - i : BLOCK;
            for (int32_t j = i + n; j < i + BLOCK; j++) s->ids[j] = 0, s->zs[j] = -INFINITY;
            best_of_block(s->zs + i, s->ids + i, n, d, &score, &token);
        }
        return token;
    }
    token = first_value(s, best);
    uint32_t word = philox_word((uint32_t)token, d->position, d->choice, (uint32_t)d->seed, (uint32_t)(d->seed >> 32));
    score = best + sm_gumbel(word);
    for (int32_t b = 0; b < s->blocks; b++) {
        if (s->maxima[b] + MAX_GUMBEL < score) continue;
        int32_t ids[BLOCK];
        for (int i = 0; i < BLOCK; i++) ids[i] = b * BLOCK + i;
        best_of_block(s->z + (int64_t)b * BLOCK, ids, BLOCK, d, &score, &token);
    }
    return token;
}

static int draw(const float *logits, const relay_draw *d, float raw_best, scratch *s, int32_t *token) {
    int plain = !d->has_penalties && !d->num_bias && !d->num_masked;
    int greedy = d->temperature < 1e-5;
    if (plain && raw_best == -INFINITY) return NOTHING_LEFT;
    if (plain && greedy) {
        *token = first_equal(logits, s->vocab, raw_best);
        return DRAWN;
    }
    int status = adjust(logits, d, s);
    if (status) return status;
    if (greedy) {
        double best = find_maxima(s);
        if (best == -INFINITY) return NOTHING_LEFT;
        *token = first_value(s, best);
        return DRAWN;
    }
    if (d->temperature != 1.0)
        for (int32_t i = 0; i < s->blocks * BLOCK; i++) s->z[i] = s->z[i] / d->temperature;
    double best = find_maxima(s);
    if (best == -INFINITY) return NOTHING_LEFT;
    if (!(best <= DBL_MAX)) return OVERFLOW_SCALED;
    int32_t survivors = -1;
    if (d->min_p > 0 || d->top_k > 0) {
        double floor_value = d->min_p > 0 ? best + sm_log(d->min_p) : -INFINITY;
        double bound = d->top_k > 0 ? bound_of_top(s, d->top_k) : -INFINITY;
        survivors = gather(s, floor_value > bound ? floor_value : bound);
        survivors = keep_top_k(s, survivors, d->top_k);
        if (d->top_p < 1) {
            int64_t total = 0;
            for (int32_t i = 0; i < survivors; i++) total += s->w[i] = sm_weight(s->zs[i] - best);
            survivors = keep_prefix(s, survivors, needed_weight(total, d->top_p));
        }
    } else if (d->top_p < 1) {
        survivors = gather_top_p(s, best, d->top_p);
    }
    *token = draw_noisy(s, d, best, survivors);
    return DRAWN;
}

/* logprob of the token, and of the num_logprobs highest finite logits, of the raw row. Returns how many of those. */
static int32_t logprobs(const float *logits, double best, const relay_draw *d, scratch *s, int32_t token, double *logprob,
                        int32_t *top_ids, double *top_logprobs) {
    for (int32_t i = 0; i < s->vocab; i++) s->z[i] = (double)logits[i];
    for (int32_t i = s->vocab; i < s->blocks * BLOCK; i++) s->z[i] = -INFINITY;
    find_maxima(s);
    double normaliser = sm_log((double)total_weight(s, best) * 0x1p-40);
    *logprob = ((double)logits[token] - best) - normaliser;
    if (d->num_logprobs == 0) return 0;
    int32_t n = keep_top_k(s, gather(s, bound_of_top(s, d->num_logprobs)), d->num_logprobs);
    for (int32_t i = 0; i < n; i++) { /* insertion sort: few, and stable, so ties stay in id order */
        double v = s->zs[i];
        int32_t id = s->ids[i], j = i;
        for (; j > 0 && s->zs[j - 1] < v; j--) s->zs[j] = s->zs[j - 1], s->ids[j] = s->ids[j - 1];
        s->zs[j] = v, s->ids[j] = id;
    }
    for (int32_t i = 0; i < n; i++) {
        top_ids[i] = s->ids[i];
        top_logprobs[i] = (s->zs[i] - best) - normaliser;
    }
    return n;
}

typedef struct { /* mirrored by _Drawn in sampler.py */
    double logprob;       /* where num_logprobs >= 0 */
    int32_t *top_ids;     /* [num_logprobs], as top_logprobs */
    double *top_logprobs;
    int32_t token, status, num_top, unused; /* with BAD_LOGIT token is the first whose logit is NaN or +inf */
} relay_drawn;

typedef struct {
    const float *logits; /* [rows][stride] */
    int64_t stride;
    const relay_draw *draws;
    relay_drawn *drawn;
    uint8_t *scratch; /* scratch_bytes for every thread */
    int64_t scratch_bytes;
    int32_t vocab;
} job_t;

static void sample_row(void *argument, long row, int thread)
{
    const job_t *job = argument;
    const float *logits = job->logits + row * job->stride;
    const relay_draw *d = job->draws + row;
    relay_drawn *out = job->drawn + row;
    scratch s = carve(job->scratch + thread * job->scratch_bytes, job->vocab);
    float best;
    out->num_top = 0;
    if (!highest(logits, job->vocab, &best)) {
        int32_t i = 0;
        while (logits[i] <= FLT_MAX) i++;
        out->token = i;
        out->status = BAD_LOGIT;
        return;
    }
    out->status = draw(logits, d, best, &s, &out->token);
    if (out->status == DRAWN && d->num_logprobs >= 0)
        out->num_top = logprobs(logits, (double)best, d, &s, out->token, &out->logprob, out->top_ids, out->top_logprobs);
}

/* Draw one token for each of `rows` rows of logits. ``memory`` is relay_sample_scratch_bytes for each thread of ``pool``,
 * which may be NULL: then the caller does all rows. */
void relay_sample_rows(pool_t *pool, const float *logits, int64_t stride, int32_t rows, int32_t vocab, const relay_draw *draws,
                       void *memory, relay_drawn *drawn)
{
    job_t job = {logits, stride, draws, drawn, memory, relay_sample_scratch_bytes(vocab), vocab};
    const uint64_t saved = fp_enter();
    if (pool)
        pool_run(pool, sample_row, &job, rows);
    else
        for (int32_t row = 0; row < rows; row++) sample_row(&job, row, 0);
    fp_leave(saved);
}
