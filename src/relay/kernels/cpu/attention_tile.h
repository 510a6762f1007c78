/* The arithmetic of one tile of keys: scores, weights, values, in the canon's order. Included by attention.c alone. */
#ifndef RELAY_ATTENTION_TILE_H
#define RELAY_ATTENTION_TILE_H

#include "attention.h"
#include "vec.h"

#define MAX_START (-1e30f)

/* Memory of one task: everything is [row], or [row][dim]. `m, l, acc` belong to the split, the others to the fold. */
typedef struct {
    float *q, *acc, *total, *m, *l, *total_m, *total_l;
    int32_t *visible; /* keys the row may see: position + 1 */
    float *p;         /* [TILE_ROWS][64] scores, then weights */
    float *wide_k, *wide_v;
} state_t;

static state_t carve(float *memory, int D)
{
    state_t s;
    s.q = memory, memory += MAX_TASK_ROWS * D;
    s.acc = memory, memory += MAX_TASK_ROWS * D;
    s.total = memory, memory += MAX_TASK_ROWS * D;
    s.m = memory, memory += MAX_TASK_ROWS;
    s.l = memory, memory += MAX_TASK_ROWS;
    s.total_m = memory, memory += MAX_TASK_ROWS;
    s.total_l = memory, memory += MAX_TASK_ROWS;
    s.visible = (int32_t *)memory, memory += MAX_TASK_ROWS;
    s.p = memory, memory += 8 * TILE;
    s.wide_k = memory, memory += TILE * D;
    s.wide_v = memory;
    return s;
}

int64_t attention_scratch_floats(int D) { return (int64_t)MAX_TASK_ROWS * (3 * D + 5) + 8 * TILE + 2 * TILE * D; }

/* One tile of keys: four units of K [dim][16] and of V [16][dim]. Scores fetch this tile's V meanwhile, values the K of the tile
 * after it, `next_k`; a unit of either has as many bytes. */
typedef struct {
    const float *k[4], *v[4], *next_k[4];
} keys_t;

#define FETCH(pointer) __builtin_prefetch((pointer), 0, 2) /* into the second level: the first is full of this tile */

/* p[r][key] = chain over the head dimension of q[r] * k[key]. */
INLINE void score_tile(const int R, const int V, const float *q, const float *const *k, const float *const *next, float *p, int D)
{
    v16 acc[MOST_ROWS][4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) acc[r][v] = v_zero();
    for (int d = 0; d < D; d++) {
        v16 kd[4];
        UNROLL for (int v = 0; v < V; v++) {
            FETCH(next[v] + d * UNIT);
            kd[v] = v_load(k[v] + d * UNIT);
        }
        UNROLL for (int r = 0; r < R; r++) {
            v16 qd = v_set1(q[r * D + d]);
            UNROLL for (int v = 0; v < V; v++) acc[r][v] = v_fma(qd, kd[v], acc[r][v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) v_store(p + r * TILE + v * UNIT, acc[r][v]);
}

/* acc[r] = acc[r] * scale[r], then fma(p[r][key], v[key], acc[r]) for the first `count` keys ascending, which all rows see.
 * `at` is the first head dimension. */
INLINE void value_tile(const int R, const int V, const float *p, const keys_t *keys, int at, int count, const float *scale, float *out, int D)
{
    v16 acc[MOST_ROWS][4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) acc[r][v] = v_mul(v_load(out + r * D + 16 * v), v_set1(scale[r]));
    for (int unit = 0; unit * UNIT < count; unit++) {
        const float *row = keys->v[unit] + at;
        const float *next = keys->next_k[unit] + at;
        const float *weight = p + unit * UNIT;
        const int left = count - unit * UNIT < UNIT ? count - unit * UNIT : UNIT;
        for (int key = 0; key < left; key++, row += D, next += D, weight++) {
            v16 x[4];
            UNROLL for (int v = 0; v < V; v++) {
                FETCH(next + 16 * v);
                x[v] = v_load(row + 16 * v);
            }
            UNROLL for (int r = 0; r < R; r++) {
                v16 pr = v_set1(weight[r * TILE]);
                UNROLL for (int v = 0; v < V; v++) acc[r][v] = v_fma(pr, x[v], acc[r][v]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) v_store(out + r * D + 16 * v, acc[r][v]);
}

/* Scores to weights: updates m and l of R rows and gives the scale their accumulators need. */
INLINE void soften(const int R, float *p, float *m, float *l, const int32_t *visible, int tile_start, float c, float *scale)
{
    float before[16], after[16];
    UNROLL for (int r = 0; r < R; r++) {
        const int left = visible[r] - tile_start;
        v16 best = v_set1(MAX_START);
        UNROLL for (int u = 0; u < 4; u++) best = v_max(best, v_first(v_load(p + r * TILE + u * UNIT), v_set1(MAX_START), left - u * UNIT));
        float high = v_max_lane(best);
        before[r] = m[r];
        after[r] = m[r] > high ? m[r] : high;
    }
    UNROLL for (int r = R; r < 16; r++) before[r] = after[r] = 0.0f;
    float a[16];
    v_store(a, v_exp2(v_mul(v_sub(v_load(before), v_load(after)), v_set1(c))));
    UNROLL for (int r = 0; r < R; r++) {
        const int left = visible[r] - tile_start;
        const v16 shift = v_set1(-(after[r] * c));
        v16 sum = v_zero();
        UNROLL for (int u = 0; u < 4; u++) {
            v16 s = v_exp2(v_fma(v_load(p + r * TILE + u * UNIT), v_set1(c), shift));
            s = v_first(s, v_zero(), left - u * UNIT);
            v_store(p + r * TILE + u * UNIT, s);
            sum = v_add(sum, s);
        }
        l[r] = f_fma(l[r], a[r], v_tree_sum(sum));
        m[r] = after[r];
        scale[r] = a[r];
    }
}

/* The keys [first, seen) of one row: those that other rows of its register tile must not see. A weight of 0 would not do,
 * because it makes a NaN of an infinite v that this row, decoded alone, never reads. */
static __attribute__((noinline)) void late_keys(const float *p, const keys_t *keys, int first, int seen, float *out, int D)
{
    for (int key = first; key < seen; key++) {
        const float *row = keys->v[key / UNIT] + key % UNIT * D;
        for (int d = 0; d < D; d += 16) v_store(out + d, v_fma(v_set1(p[key]), v_load(row + d), v_load(out + d)));
    }
}

INLINE void rows_of_tile(const int R, const state_t *s, int row, const keys_t *keys, int tile_start, float c, int D)
{
    float scale[MOST_ROWS];
    int seen[MOST_ROWS], most = 0, least = TILE;
    const int V = TILE_VECTORS(R);
    UNROLL for (int r = 0; r < R; r++) {
        const int left = s->visible[row + r] - tile_start;
        seen[r] = left < 0 ? 0 : left < TILE ? left : TILE;
        most = seen[r] > most ? seen[r] : most;
        least = seen[r] < least ? seen[r] : least;
    }
    if (most == 0) return;
    if (V == 4 && most <= 2 * UNIT) /* the diagonal: two units hold every key these rows see, the other scores are masked */
        score_tile(R, 2, s->q + row * D, keys->k, keys->v, s->p, D);
    else
        UNROLL for (int u = 0; u < 4; u += V)
            if (u * UNIT < most) score_tile(R, V, s->q + row * D, keys->k + u, keys->v + u, s->p + u * UNIT, D);
    soften(R, s->p, s->m + row, s->l + row, s->visible + row, tile_start, c, scale);
    int d = 0;
    for (; d + 16 * V <= D; d += 16 * V) value_tile(R, V, s->p, keys, d, least, scale, s->acc + row * D + d, D);
    for (; d < D; d += 16) value_tile(R, 1, s->p, keys, d, least, scale, s->acc + row * D + d, D);
    if (most > least)
        for (int r = 0; r < R; r++) late_keys(s->p + r * TILE, keys, least, seen[r], s->acc + (row + r) * D, D);
}

static __attribute__((noinline)) void some_rows(int R, const state_t *s, int row, const keys_t *keys, int tile_start, float c, int D)
{
    switch (R) {
    case 1: rows_of_tile(1, s, row, keys, tile_start, c, D); break;
    case 2: rows_of_tile(2, s, row, keys, tile_start, c, D); break;
    case 3: rows_of_tile(3, s, row, keys, tile_start, c, D); break;
    case 4: rows_of_tile(4, s, row, keys, tile_start, c, D); break;
#if TILE_ROWS > 4
    case 5: rows_of_tile(5, s, row, keys, tile_start, c, D); break;
    case 6: rows_of_tile(6, s, row, keys, tile_start, c, D); break;
#endif
    }
}

#endif
