/* The sampler in C: bit for bit what kernels/sampler.py draws, without its sorts and full-vocabulary passes.
 *
 * One row is one call; rows share nothing, so threads may take them in any order. What is skipped is only what provably cannot
 * be chosen: blocks of 64 tokens whose best value is under a bound. All comparisons are on the canonical fp64 values.
 * Compile with -ffp-contract=off, without -ffast-math. */
#include "sampler_math.h"

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

typedef struct {
    int32_t vocab, blocks;
    double *z;       /* [blocks * 64] adjusted, then divided by the temperature; padded with -inf */
    double *maxima;  /* [blocks] highest z of each block */
    int64_t *w;      /* [blocks * 64] weights */
    double *zs;      /* [blocks * 64] values of the survivors, in id order */
    int32_t *ids;    /* [blocks * 64] their ids */
    double *select;  /* [blocks * 64] reordered by select_prefix */
    int64_t *select_w;
} scratch;

/* Bytes of scratch memory a draw over ``vocab`` tokens needs, 64-byte aligned. */
int64_t relay_sample_scratch_bytes(int32_t vocab) {
    int64_t padded = ((int64_t)vocab + BLOCK - 1) / BLOCK * BLOCK;
    return padded * (8 + 8 + 8 + 4 + 8 + 8) + (padded / BLOCK + 8) * 8;
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

/* Highest of 64 doubles; a > b ? a : b is the vector maximum of every instruction set. */
static inline double block_max(const double *x) {
    double m[16];
    for (int j = 0; j < 16; j++) m[j] = x[j];
    for (int i = 16; i < BLOCK; i += 16)
        for (int j = 0; j < 16; j++) m[j] = x[i + j] > m[j] ? x[i + j] : m[j];
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++) m[j] = m[j + half] > m[j] ? m[j + half] : m[j];
    return m[0];
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

/* Fill s->maxima; returns the highest. */
static double find_maxima(scratch *s) {
    double best = -INFINITY;
    for (int32_t b = 0; b < s->blocks; b++) {
        double m = block_max(s->z + (int64_t)b * BLOCK);
        s->maxima[b] = m;
        best = m > best ? m : best;
    }
    return best;
}

static int32_t first_value(const scratch *s, double value) {
    int32_t b = 0;
    while (s->maxima[b] != value) b++;
    int32_t i = b * BLOCK;
    while (s->z[i] != value) i++;
    return i;
}

/* The prefix of the order (value descending, then position ascending) whose weights reach ``needed``: its least value into
 * *cut, and returns the weight still to be taken from the values equal to *cut (0 < returned <= their sum).
 * 0 < needed <= sum of w[0..n). Three-way quickselect; reorders x and w. */
static int64_t select_prefix(double *x, int64_t *w, int32_t n, int64_t needed, double *cut) {
    uint32_t state = 12345;
    int32_t low = 0, high = n;
    for (;;) {
        state = state * 1664525u + 1013904223u;
        double a = x[low + (int32_t)(((uint64_t)state * (uint32_t)(high - low)) >> 32)];
        double b = x[low], c = x[low + (high - low) / 2];
        double pivot = a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b)); /* the median */
        int32_t greater = low, i = low, less = high;
        int64_t above = 0, equal = 0;
        while (i < less) {
            double v = x[i];
            int64_t u = w[i];
            if (v > pivot) {
                x[i] = x[greater], w[i] = w[greater], x[greater] = v, w[greater] = u;
                above += u, greater++, i++;
            } else if (v < pivot) {
                less--;
                x[i] = x[less], w[i] = w[less], x[less] = v, w[less] = u;
            } else {
                equal += u, i++;
            }
        }
        if (needed <= above) {
            high = greater;
        } else if (needed <= above + equal) {
            *cut = pivot;
            return needed - above;
        } else {
            needed -= above + equal;
            low = less;
        }
    }
}

/* Collect ids and values with z >= bound (and finite), in id order; returns their number. */
static int32_t gather(scratch *s, double bound) {
    int32_t n = 0;
    for (int32_t b = 0; b < s->blocks; b++) {
        if (!(s->maxima[b] >= bound)) continue;
        for (int32_t i = b * BLOCK; i < (b + 1) * BLOCK; i++) {
            s->ids[n] = i;
            s->zs[n] = s->z[i];
            n += s->z[i] >= bound && s->z[i] > -INFINITY;
        }
    }
    return n;
}

/* Keep the survivors over ``cut`` and, lowest ids first, those equal to it until ``rest`` is used up at ``each`` a token. */
static int32_t keep(scratch *s, int32_t n, double cut, int64_t rest, int64_t each) {
    int32_t kept = 0;
    for (int32_t i = 0; i < n; i++) {
        double v = s->zs[i];
        if (v == cut && rest > 0)
            rest -= each;
        else if (!(v > cut))
            continue;
        s->zs[kept] = v;
        s->ids[kept++] = s->ids[i];
    }
    return kept;
}

/* The k-th highest block maximum: at least k tokens reach it. -inf where that says nothing. */
static double bound_of_top(scratch *s, int32_t k) {
    if (k > s->blocks) return -INFINITY;
    for (int32_t b = 0; b < s->blocks; b++) s->select[b] = s->maxima[b], s->select_w[b] = 1;
    double cut;
    select_prefix(s->select, s->select_w, s->blocks, k, &cut);
    return cut;
}

static int32_t keep_top_k(scratch *s, int32_t n, int32_t k) {
    if (k <= 0 || k >= n) return n;
    for (int32_t i = 0; i < n; i++) s->select[i] = s->zs[i], s->select_w[i] = 1;
    double cut;
    int64_t rest = select_prefix(s->select, s->select_w, n, k, &cut);
    return keep(s, n, cut, rest, 1);
}

static int64_t needed_weight(int64_t total, double top_p) {
    double needed = ceil(top_p * (double)total);
    int64_t whole = needed < 0x1p62 ? (int64_t)needed : total;
    whole = whole < 1 ? 1 : whole;
    return whole < total ? whole : total;
}

static int32_t keep_prefix(scratch *s, int32_t n, int64_t needed) {
    for (int32_t i = 0; i < n; i++) s->select[i] = s->zs[i], s->select_w[i] = s->w[i];
    double cut;
    int64_t rest = select_prefix(s->select, s->select_w, n, needed, &cut);
    int64_t each = 1;
    for (int32_t i = 0; i < n; i++) each = s->zs[i] == cut ? s->w[i] : each;
    return keep(s, n, cut, rest, each > 0 ? each : 1);
}

/* Σ weights of z - best over all blocks. */
static int64_t total_weight(const scratch *s, double best) {
    int64_t total = 0;
    for (int32_t b = 0; b < s->blocks; b++) {
        if (s->maxima[b] - best < -28.0) continue; /* each weighs 0 */
        const double *z = s->z + (int64_t)b * BLOCK;
        int64_t sum = 0;
        for (int i = 0; i < BLOCK; i++) sum += sm_weight(z[i] - best);
        total += sum;
    }
    return total;
}

/* Gather exactly the nucleus of all tokens. */
static int32_t gather_top_p(scratch *s, double best, double top_p) {
    int64_t total = total_weight(s, best), needed = needed_weight(total, top_p);
    /* All tokens of weight <= (total - needed) / vocab together weigh no more than the prefix leaves out, so none of them is
     * in it. The margin of e^-0.001 is far over the error of weights and logarithm. */
    int64_t spare = (total - needed) / s->vocab;
    double bound = best - 28.0;
    if (spare > 0) {
        double tail = sm_log((double)spare * 0x1p-40) - 0.001;
        bound = tail > -28.0 ? best + tail : bound;
    }
    int32_t n = gather(s, bound);
    for (int32_t i = 0; i < n; i++) s->w[i] = sm_weight(s->zs[i] - best);
    return keep_prefix(s, n, needed);
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

/* Draw one token. Outputs: *token; where d->num_logprobs >= 0 also *logprob, top_ids and top_logprobs [num_logprobs] and
 * *num_top. Returns a status; with BAD_LOGIT *token is the first token whose logit is NaN or +inf. */
int32_t relay_sample_row(const float *logits, int32_t vocab, const relay_draw *d, void *memory, int32_t *token,
                         double *logprob, int32_t *top_ids, double *top_logprobs, int32_t *num_top) {
    scratch s = carve(memory, vocab);
    float best;
    if (!highest(logits, vocab, &best)) {
        int32_t i = 0;
        while (logits[i] <= FLT_MAX) i++;
        *token = i;
        return BAD_LOGIT;
    }
    int32_t status = draw(logits, d, best, &s, token);
    if (status == DRAWN && d->num_logprobs >= 0)
        *num_top = logprobs(logits, (double)best, d, &s, *token, logprob, top_ids, top_logprobs);
    return status;
}
