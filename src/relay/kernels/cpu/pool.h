/* A few threads that share the items of one job at a time and sleep in between. */
#ifndef RELAY_POOL_H
#define RELAY_POOL_H

#include <stdint.h>

typedef struct pool pool_t;
/* Does item `item` of a job; `thread` (0 is the caller) picks scratch memory only, never an order of additions. */
typedef void (*job_fn)(void *argument, long item, int thread);

pool_t *pool_create(int threads); /* NULL when threads cannot be started */
void pool_destroy(pool_t *pool);
int pool_threads(const pool_t *pool);
/* Runs items 0..items-1, each once, on the caller and on whichever helpers come; returns when all are done. Each thread starts
 * with its own share, [pool_share(thread), pool_share(thread + 1)): ops that give the same rows the same share find their
 * inputs in their own core's caches, where another core's cost a multiple. */
void pool_run(pool_t *pool, job_fn fn, void *argument, long items);
long pool_share(const pool_t *pool, long items, int thread);

/* Round to nearest, subnormals kept. Returns what fp_leave restores. */
uint64_t fp_enter(void);
void fp_leave(uint64_t saved);

#endif
