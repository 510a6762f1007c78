/* Which tokens survive min-p, top-k and top-p: selection instead of sorting, and bounds that skip most of the vocabulary.
 *
 * The order of tokens is (value descending, id ascending); all comparisons are on the canonical fp64 values. */
#ifndef RELAY_SAMPLER_FILTER_H
#define RELAY_SAMPLER_FILTER_H

#include "sampler_math.h"

#include <math.h>

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

/* Fill s->maxima; returns the highest. */
static inline double find_maxima(scratch *s) {
    double best = -INFINITY;
    for (int32_t b = 0; b < s->blocks; b++) {
        double m = block_max(s->z + (int64_t)b * BLOCK);
        s->maxima[b] = m;
        best = m > best ? m : best;
    }
    return best;
}

/* The prefix of the order (value descending, then position ascending) whose weights reach ``needed``: its least value into
 * *cut, and returns the weight still to be taken from the values equal to *cut (0 < returned <= their sum).
 * 0 < needed <= sum of w[0..n). Three-way quickselect; reorders x and w. */
static inline int64_t select_prefix(double *x, int64_t *w, int32_t n, int64_t needed, double *cut) {
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
static inline int32_t gather(scratch *s, double bound) {
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
static inline int32_t keep(scratch *s, int32_t n, double cut, int64_t rest, int64_t each) {
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
static inline double bound_of_top(scratch *s, int32_t k) {
    if (k > s->blocks) return -INFINITY;
    for (int32_t b = 0; b < s->blocks; b++) s->select[b] = s->maxima[b], s->select_w[b] = 1;
    double cut;
    select_prefix(s->select, s->select_w, s->blocks, k, &cut);
    return cut;
}

static inline int32_t keep_top_k(scratch *s, int32_t n, int32_t k) {
    if (k <= 0 || k >= n) return n;
    for (int32_t i = 0; i < n; i++) s->select[i] = s->zs[i], s->select_w[i] = 1;
    double cut;
    int64_t rest = select_prefix(s->select, s->select_w, n, k, &cut);
    return keep(s, n, cut, rest, 1);
}

static inline int64_t needed_weight(int64_t total, double top_p) {
    double needed = ceil(top_p * (double)total);
    int64_t whole = needed < 0x1p62 ? (int64_t)needed : total;
    whole = whole < 1 ? 1 : whole;
    return whole < total ? whole : total;
}

static inline int32_t keep_prefix(scratch *s, int32_t n, int64_t needed) {
    for (int32_t i = 0; i < n; i++) s->select[i] = s->zs[i], s->select_w[i] = s->w[i];
    double cut;
    int64_t rest = select_prefix(s->select, s->select_w, n, needed, &cut);
    int64_t each = 1;
    for (int32_t i = 0; i < n; i++) each = s->zs[i] == cut ? s->w[i] : each;
    return keep(s, n, cut, rest, each > 0 ? each : 1);
}

/* Σ weights of z - best over all blocks. */
static inline int64_t total_weight(const scratch *s, double best) {
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
static inline int32_t gather_top_p(scratch *s, double best, double top_p) {
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

#endif
