/* A pool of threads for very short jobs: a helper looks for work a little while before it sleeps.

   - One job at a time. A second caller (another engine of the process) finds the pool taken and works alone.
   - Items are handed out one by one, and only items are waited for: a helper the system holds up costs the item it has,
     and nothing if it has none.
   - A child made by fork has no helpers: it starts its own. */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define LOOKS 20000 /* some 100 microseconds of looking before a helper sleeps */
#define MOST_THREADS 256

#if defined(__x86_64__) || defined(__i386__)
#define relax() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define relax() __asm__ volatile("yield")
#else
#define relax() ((void)0)
#endif

static pthread_mutex_t taken = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t asleep = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken = PTHREAD_COND_INITIALIZER;

static atomic_int wanted = 1; /* threads a job may use, the caller's among them */
static int helpers = 0;       /* threads started */
static int sleeping = 0;      /* of them asleep; under `asleep` */

static struct {
    _Atomic(work) do_item;
    _Atomic(const void *) data;
    atomic_long items;
} job; /* written only while `state` says that no item is left */

/* The job's number in the upper half, the items nobody has taken in the lower. Taking one is one exchange, which fails
   if meanwhile the job has become another: so whoever takes an item has read that item's job. */
static _Atomic uint64_t state = 0;
static atomic_long done = 0;

static void take_items(void) {
    uint64_t seen = atomic_load_explicit(&state, memory_order_acquire);
    while ((uint32_t)seen) {
        work do_item = atomic_load_explicit(&job.do_item, memory_order_relaxed);
        const void *data = atomic_load_explicit(&job.data, memory_order_relaxed);
        long items = atomic_load_explicit(&job.items, memory_order_relaxed);
        if (!atomic_compare_exchange_weak_explicit(&state, &seen, seen - 1, memory_order_acq_rel, memory_order_acquire))
            continue;
        do_item(data, items - (long)(uint32_t)seen);
        atomic_fetch_add_explicit(&done, 1, memory_order_release);
        seen = atomic_load_explicit(&state, memory_order_acquire);
    }
}

static uint32_t job_number(void) { return (uint32_t)(atomic_load_explicit(&state, memory_order_acquire) >> 32); }

static void wait_for_job(uint32_t seen) {
    for (int i = 0; i < LOOKS; i++) {
        if (job_number() != seen) return;
        relax();
    }
    pthread_mutex_lock(&asleep);
    sleeping++;
    while (job_number() == seen) pthread_cond_wait(&woken, &asleep);
    sleeping--;
    pthread_mutex_unlock(&asleep);
}

static void *help(void *index) {
    for (uint32_t seen = 0;;) {
        wait_for_job(seen);
        seen = job_number();
        if ((int)(intptr_t)index < atomic_load(&wanted) - 1) take_items();
    }
    return NULL;
}

static void forget_helpers(void) {
    helpers = sleeping = 0;
    pthread_mutex_init(&taken, NULL);
    pthread_mutex_init(&asleep, NULL);
    pthread_cond_init(&woken, NULL);
}

static void start_helpers(void) {
    static int watches_forks = 0;
    if (!watches_forks) watches_forks = !pthread_atfork(NULL, NULL, forget_helpers);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; helpers < atomic_load(&wanted) - 1; helpers++)
        if (pthread_create(&thread, &attributes, help, (void *)(intptr_t)helpers)) {
            atomic_store(&wanted, helpers + 1); /* the system gives no more */
            break;
        }
    pthread_attr_destroy(&attributes);
}

void set_threads(int threads) {
    atomic_store(&wanted, threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads);
}

void share(work do_item, const void *data, long items) {
    if (items <= 1 || atomic_load(&wanted) == 1 || pthread_mutex_trylock(&taken)) {
        for (long item = 0; item < items; item++) do_item(data, item);
        return;
    }
    start_helpers();
    atomic_store_explicit(&job.do_item, do_item, memory_order_relaxed);
    atomic_store_explicit(&job.data, data, memory_order_relaxed);
    atomic_store_explicit(&job.items, items, memory_order_relaxed);
    atomic_store(&done, 0);
    atomic_store(&state, ((uint64_t)(job_number() + 1) << 32) | (uint32_t)items);
    pthread_mutex_lock(&asleep);
    if (sleeping) pthread_cond_broadcast(&woken);
    pthread_mutex_unlock(&asleep);
    take_items();
    while (atomic_load_explicit(&done, memory_order_acquire) < items) relax();
    pthread_mutex_unlock(&taken);
}
