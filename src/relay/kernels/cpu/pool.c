/* Threads without collapse: helpers join a job only while it is open, and the caller waits only for those that joined.
 *
 * `state` is generation << 32 | OPEN | joined. A helper that is asleep or descheduled when a job opens simply misses it, so two
 * workers with two threads each on two cores lose no time to a helper that waits for a core. A helper that loses its core in the
 * middle of an item does hold the caller up; after such a stall the caller works alone for a while (twice as long each time), so
 * that workers that compete for the cores end up with one thread each. Waiting spins for microseconds, then
 * sleeps on a futex; an idle pool costs nothing. */
#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define OPEN 0x80000000u
#define SPIN_NS 10000        /* a helper between jobs: then it gives its core away, */
#define YIELD_NS 200000      /* then it sleeps: longer than an item of a large step takes the others */
#define CALLER_SPIN_NS 20000 /* the caller waiting for helpers never yields: it would lose its core for a whole time slice. It */
#define MOST_SPIN_NS 200000  /* spins as long as one of its own items took, since a helper that runs has one left at most */
#define STALL_NS 100000 /* waiting this long, and longer than the caller's own work took, is a stall */
#define MOST_ALONE 128  /* jobs */
#define MAX_THREADS 256

struct helper {
    pool_t *pool;
    int index;
};

struct pool {
    int threads;
    pthread_t ids[MAX_THREADS];
    struct helper helpers[MAX_THREADS];
    job_fn fn;
    void *argument;
    int alone, alone_next; /* jobs the caller still does by itself; how many after the next stall */
    _Alignas(64) _Atomic uint64_t state;
    struct {
        _Alignas(64) _Atomic long next;
        long end;
    } shares[MAX_THREADS]; /* each thread's own items; whoever is done with those goes on with the others' */
    _Alignas(64) _Atomic uint32_t opened; /* counts jobs; helpers sleep on it */
    _Atomic int sleepers;
    _Atomic int stopping;
    _Alignas(64) _Atomic uint32_t finished; /* counts joined helpers that left a closed job last; the caller sleeps on it */
    _Atomic int caller_sleeps;
};

#if defined(__x86_64__)
#include <immintrin.h>
static void relax(void) { _mm_pause(); }
uint64_t fp_enter(void)
{
    uint32_t saved = _mm_getcsr();
    _mm_setcsr(0x1F80);
    return saved;
}
void fp_leave(uint64_t saved) { _mm_setcsr((uint32_t)saved); }
#elif defined(__aarch64__)
static void relax(void) { __asm__ volatile("yield"); }
uint64_t fp_enter(void)
{
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return saved;
}
void fp_leave(uint64_t saved) { __asm__ volatile("msr fpcr, %0" : : "r"(saved)); }
#else
#error "Relay's kernels know x86-64 and arm64"
#endif

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); }
static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void pause_a_little(void)
{
    for (int i = 0; i < 16; i++) relax();
}

/* Returns how many items this thread did. */
static long work(pool_t *pool, int thread)
{
    long done = 0;
    for (int i = 0; i < pool->threads; i++) {
        const int owner = (thread + i) % pool->threads;
        long item;
        while ((item = atomic_fetch_add(&pool->shares[owner].next, 1)) < pool->shares[owner].end) pool->fn(pool->argument, item, thread), done++;
    }
    return done;
}

static void try_join(pool_t *pool, int thread)
{
    uint64_t state = atomic_load(&pool->state);
    while (state & OPEN)
        if (atomic_compare_exchange_weak(&pool->state, &state, state + 1)) {
            work(pool, thread);
            state = atomic_fetch_sub(&pool->state, 1) - 1;
            if ((uint32_t)state == 0) { /* closed and empty: the caller may be asleep */
                atomic_fetch_add(&pool->finished, 1);
                if (atomic_load(&pool->caller_sleeps)) futex_wake(&pool->finished);
            }
            return;
        }
}

static void *helper_main(void *argument)
{
    struct helper *helper = argument;
    pool_t *pool = helper->pool;
    uint32_t seen = 0;
    fp_enter();
    for (;;) {
        int64_t start = now_ns();
        while (atomic_load(&pool->opened) == seen && !atomic_load(&pool->stopping)) {
            const int64_t waited = now_ns() - start;
            if (waited < SPIN_NS) {
                pause_a_little();
            } else if (waited < YIELD_NS) {
                sched_yield();
            } else {
                atomic_fetch_add(&pool->sleepers, 1);
                if (atomic_load(&pool->opened) == seen && !atomic_load(&pool->stopping)) futex_wait(&pool->opened, seen);
                atomic_fetch_sub(&pool->sleepers, 1);
                start = now_ns();
            }
        }
        if (atomic_load(&pool->stopping)) return NULL;
        seen = atomic_load(&pool->opened);
        try_join(pool, helper->index);
    }
}

pool_t *pool_create(int threads)
{
    if (threads < 1 || threads > MAX_THREADS) return NULL;
    pool_t *pool = aligned_alloc(64, (sizeof(pool_t) + 63) / 64 * 64);
    if (!pool) return NULL;
    __builtin_memset(pool, 0, sizeof *pool);
    pool->threads = 1;
    pool->alone_next = 4;
    for (int i = 1; i < threads; i++) {
        pool->helpers[i] = (struct helper){pool, i};
        if (pthread_create(&pool->ids[i], NULL, helper_main, &pool->helpers[i])) {
            pool_destroy(pool);
            return NULL;
        }
        pool->threads = i + 1;
    }
    return pool;
}

void pool_destroy(pool_t *pool)
{
    atomic_store(&pool->stopping, 1);
    atomic_fetch_add(&pool->opened, 1);
    futex_wake(&pool->opened);
    for (int i = 1; i < pool->threads; i++) pthread_join(pool->ids[i], NULL);
    free(pool);
}

int pool_threads(const pool_t *pool) { return pool->threads; }
long pool_share(const pool_t *pool, long items, int thread) { return items * thread / pool->threads; }

void pool_run(pool_t *pool, job_fn fn, void *argument, long items)
{
    if (pool->threads == 1 || items <= 1 || pool->alone > 0) {
        if (pool->alone > 0) pool->alone--;
        for (long item = 0; item < items; item++) fn(argument, item, 0);
        return;
    }
    /* Nobody is joined here: the last job was closed and left. */
    pool->fn = fn;
    pool->argument = argument;
    for (int i = 0; i < pool->threads; i++) {
        atomic_store(&pool->shares[i].next, pool_share(pool, items, i));
        pool->shares[i].end = pool_share(pool, items, i + 1);
    }
    uint64_t generation = (atomic_load(&pool->state) >> 32) + 1;
    atomic_store(&pool->state, generation << 32 | OPEN);
    atomic_fetch_add(&pool->opened, 1);
    if (atomic_load(&pool->sleepers)) futex_wake(&pool->opened);
    const int64_t begun = now_ns();
    const long done = work(pool, 0);
    uint64_t state = atomic_fetch_and(&pool->state, ~(uint64_t)OPEN);
    if ((uint32_t)(state & ~OPEN) == 0) return;
    const int64_t start = now_ns(), item = done ? (start - begun) * 5 / 4 / done : 0;
    const int64_t spin = item < CALLER_SPIN_NS ? CALLER_SPIN_NS : item < MOST_SPIN_NS ? item : MOST_SPIN_NS;
    while ((uint32_t)atomic_load(&pool->state) != 0)
        if (now_ns() - start < spin) {
            pause_a_little();
        } else {
            uint32_t seen = atomic_load(&pool->finished);
            atomic_store(&pool->caller_sleeps, 1);
            if ((uint32_t)atomic_load(&pool->state) != 0) futex_wait(&pool->finished, seen);
            atomic_store(&pool->caller_sleeps, 0);
        }
    const int64_t waited = now_ns() - start;
    if (waited > STALL_NS && waited > start - begun) {
        pool->alone = pool->alone_next;
        if (pool->alone_next < MOST_ALONE) pool->alone_next *= 2;
    } else if (pool->alone_next > 4) {
        pool->alone_next--;
    }
}
