/* Causal attention over pages, read where they lie.

   A query's bits depend on its own keys, values and positions: every score is one dot product in one order, the weights
   are summed in lanes by absolute position, and each output is one chain over the keys it sees, from the first to the
   last; a sink's weight is added to the whole sum. Not on the page size, the chunk it came in, its neighbours, or who computes it. What a query must not see is not
   read for it, so another's NaN cannot reach it. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "pool.h"
#include "vector.h"

#define ROWS 3 /* query rows of a tile */
#define KEYS 4 /* keys of a tile */
#define AHEAD 16 /* positions fetched before they are read */

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

typedef struct {
    long heads, group, dim, pages, page_size;
    float scale, softcap; /* 0: none */
    long window;          /* 0: none */
} layer;

typedef struct {
    const int64_t *blocks; /* [items / heads, 3]: row, its first query, number of queries */
    const int64_t *offsets, *starts, *table;
    long table_width;
} step;

typedef struct {
    const layer *of;
    const step *s;
    const void *cache; /* [2, heads, pages, page_size, dim]: keys, then values */
    int is_e4m3;       /* of 8 bits; else fp32 */
    const float *q; /* [queries, heads * group, dim], queries ldq apart */
    long ldq;
    const float *sinks; /* [heads * group]; NULL: none */
    float *out; /* [queries, heads * group, dim] */
} attention_job;

/* One item: some queries of one row, all query heads of one key head. */
typedef struct {
    const layer *of;
    const int64_t *table; /* the row's pages */
    const float *keys, *values;
    long first; /* position of the first score: at a lane boundary, none later is seen first */
    long width; /* scores a query row has room for */
} block;

/* Each thread's scratch, freed when the thread ends. */
static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static _Thread_local float *scratch = NULL;
static _Thread_local size_t scratch_size = 0;

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

static float *take_scratch(size_t floats) {
    if (floats > scratch_size) {
        pthread_once(&scratch_once, make_scratch_key);
        free(scratch);
        scratch_size = floats + floats / 2;
        if (posix_memalign((void **)&scratch, 64, scratch_size * sizeof(float))) abort();
        pthread_setspecific(scratch_key, scratch);
    }
    return scratch;
}

INLINE const float *row_at(const block *b, const float *plane, long position) {
    const layer *l = b->of;
    return plane + (b->table[position / l->page_size] * l->page_size + position % l->page_size) * l->dim;
}

INLINE long first_visible(const layer *l, long position) {
    return l->window && position >= l->window ? position - l->window + 1 : 0;
}

/* Lane sums of four vectors: r[0], r[2], r[1], r[3] in lanes 0, 1, 4, 5. */
INLINE void sums(const vec a[KEYS], float *out) {
    vec ab = SHUFFLE(a[0], a[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a[0], a[1], 4, 5, 6, 7, 12, 13, 14, 15);
    vec cd = SHUFFLE(a[2], a[3], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a[2], a[3], 4, 5, 6, 7, 12, 13, 14, 15);
    vec pairs = SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    vec ones = SHUFFLE(pairs, pairs, 0, 2, 0, 2, 4, 6, 4, 6) + SHUFFLE(pairs, pairs, 1, 3, 1, 3, 5, 7, 5, 7);
    out[0] = ones[0];
    out[1] = ones[4];
    out[2] = ones[1];
    out[3] = ones[5];
}

/* Scores of R query rows and four keys. */
#define SCORES(R)                                                                                          \
    static void scores_##R(const float *q, long dim, const float *const k[KEYS], float *out, long width) { \
        vec acc[R][KEYS];                                                                                  \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < KEYS; j++) acc[r][j] = all(0);       \
        for (long d = 0; d < dim; d += LANES) {                                                            \
            vec query[R];                                                                                  \
            UNROLL for (int r = 0; r < R; r++) query[r] = load(q + r * dim + d);                           \
            UNROLL for (int j = 0; j < KEYS; j++) {                                                        \
                vec key = load(k[j] + d);                                                                  \
                UNROLL for (int r = 0; r < R; r++) acc[r][j] = fused(query[r], key, acc[r][j]);            \
            }                                                                                              \
        }                                                                                                  \
        UNROLL for (int r = 0; r < R; r++) sums(acc[r], out + r * width);                                  \
    }
SCORES(1) SCORES(2) SCORES(3)

/* Walks a plane's rows, position by position, and fetches what comes soon. */
typedef struct {
    const float *plane, *at;
    long left, page; /* rows left in the page `at` lies in, the page after it */
} cursor;

INLINE cursor cursor_at(const block *b, const float *plane, long position) {
    long size = b->of->page_size;
    return (cursor){plane, row_at(b, plane, position), size - position % size, position / size + 1};
}

INLINE const float *next_row(const block *b, cursor *c) {
    if (!c->left) {
        c->at = c->plane + b->table[c->page++] * b->of->page_size * b->of->dim;
        c->left = b->of->page_size;
    }
    const float *row = c->at;
    c->at += b->of->dim;
    c->left--;
    return row;
}

static void score(const block *b, const float *q, long rows, long end, float *scores) {
    long dim = b->of->dim;
    cursor keys = cursor_at(b, b->keys, b->first);
    long soon = b->first + AHEAD;
    cursor ahead = soon < end ? cursor_at(b, b->keys, soon) : keys;
    for (long j = b->first; j < end; j += KEYS) {
        const float *k[KEYS];
        for (int i = 0; i < KEYS; i++) {
            k[i] = j + i < end ? next_row(b, &keys) : k[i - 1];
            if (soon < end) {
                const char *line = (const char *)next_row(b, &ahead);
                for (long d = 0; d < dim; d += 16) __builtin_prefetch(line + 4 * d);
                soon++;
            }
        }
        float *out = scores + (j - b->first);
        for (long r = 0; r < rows; r += ROWS, out += ROWS * b->width) {
            if (rows - r >= 3) scores_3(q + r * dim, dim, k, out, b->width);
            else if (rows - r == 2) scores_2(q + r * dim, dim, k, out, b->width);
            else scores_1(q + r * dim, dim, k, out, b->width);
        }
    }
}

/* Scores of positions visible .. position become weights; returns their sum, with that of a sink (NULL: none). */
static float soften(const block *b, float *s, long visible, long position, const float *sink) {
    long low = (visible - b->first) / LANES * LANES, count = position + 1 - b->first;
    for (long j = low; j < visible - b->first; j++) s[j] = -INFINITY;
    for (long j = count; j % LANES; j++) s[j] = -INFINITY;
    vec most = all(-INFINITY), total = all(0);
    float cap = b->of->softcap;
    for (long j = low; j < count; j += LANES) {
        vec x = load(s + j);
        if (cap != 0) { /* cap tanh(x / cap), tanh(y) = 1 - 2 / (exp(2 y) + 1); what is hidden stays so */
            vec capped = all(cap) - all(2 * cap) / (exponential(x * all(2 / cap)) + all(1));
            x = choose(x == all(-INFINITY), x, capped);
            store(s + j, x);
        }
        most = choose(x > most, x, most);
    }
    vec top = all(largest(most));
    if (sink) top = choose(top < all(*sink), all(*sink), top);
    for (long j = low; j < count; j += LANES) {
        vec weight = exponential(load(s + j) - top);
        store(s + j, weight);
        total += weight;
    }
    return sink ? sum(total) + exponential(all(*sink) - top)[0] : sum(total);
}

/* acc[r][c] += weight[r][j] * value[j][c] for j in low .. high - 1, page by page. */
#define MIX(R, C)                                                                                                 \
    INLINE void mix_##R##_##C(const block *b, const float *weights, long low, long high, long d, vec acc[R][C]) { \
        long size = b->of->page_size, dim = b->of->dim;                                                           \
        while (low < high) {                                                                                      \
            const float *v = row_at(b, b->values, low) + d;                                                       \
            long stop = (low / size + 1) * size;                                                                  \
            if (stop > high) stop = high;                                                                         \
            const float *w = weights - b->first;                                                                  \
            const float *ahead = stop < high ? row_at(b, b->values, stop) + d : v;                                \
            for (long j = low; j < stop; j++, v += dim, ahead += dim) {                                           \
                for (int c = 0; c < C; c += 2) __builtin_prefetch(ahead + c * LANES);                             \
                vec value[C];                                                                                     \
                UNROLL for (int c = 0; c < C; c++) value[c] = load(v + c * LANES);                                \
                UNROLL for (int r = 0; r < R; r++) {                                                              \
                    vec factor = all(w[r * b->width + j]);                                                        \
                    UNROLL for (int c = 0; c < C; c++) acc[r][c] = fused(factor, value[c], acc[r][c]);            \
                }                                                                                                 \
            }                                                                                                     \
            low = stop;                                                                                           \
        }                                                                                                         \
    }

/* R query rows, C vectors of their output from element d on: what one sees before all do, what all see, the rest. */
#define OUTPUT(R, C)                                                                                      \
    MIX(R, C)                                                                                             \
    static void output_##R##_##C(const block *b, const float *weights, const long *low, const long *high, \
                                 const float *total, long d, float *const *out) {                         \
        vec acc[R][C];                                                                                    \
        long from = low[R - 1], to = high[0];                                                             \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) acc[r][c] = all(0);         \
        if (to < from) to = from;                                                                         \
        for (int r = 0; r < R; r++)                                                                       \
            mix_1_##C(b, weights + r * b->width, low[r], from < high[r] ? from : high[r], d, &acc[r]);    \
        mix_##R##_##C(b, weights, from, to, d, acc);                                                      \
        for (int r = 0; r < R; r++) {                                                                     \
            mix_1_##C(b, weights + r * b->width, to, high[r], d, &acc[r]);                                \
            UNROLL for (int c = 0; c < C; c++) store(out[r] + d + c * LANES, acc[r][c] / all(total[r]));  \
        }                                                                                                 \
    }

MIX(1, 1) MIX(1, 4)
#define OUTPUT_1(C)                                                                                   \
    static void output_1_##C(const block *b, const float *weights, const long *low, const long *high, \
                             const float *total, long d, float *const *out) {                         \
        vec acc[1][C];                                                                                \
        UNROLL for (int c = 0; c < C; c++) acc[0][c] = all(0);                                        \
        mix_1_##C(b, weights, low[0], high[0], d, acc);                                               \
        UNROLL for (int c = 0; c < C; c++) store(out[0] + d + c * LANES, acc[0][c] / all(total[0]));  \
    }
OUTPUT_1(1) OUTPUT_1(4)
OUTPUT(2, 1) OUTPUT(2, 4) OUTPUT(3, 1) OUTPUT(3, 4)

typedef void (*output)(const block *, const float *, const long *, const long *, const float *, long, float *const *);
static const output one_vector[ROWS + 1] = {NULL, output_1_1, output_2_1, output_3_1};
static const output four_vectors[ROWS + 1] = {NULL, output_1_4, output_2_4, output_3_4};

/* Positions first .. end - 1 of a plane of 8 bits, one below the other. */
static void expand_rows(const layer *l, const int64_t *table, const uint8_t *plane, long first, long end, float *out) {
    for (long j = first; j < end; j++) {
        const uint8_t *row = plane + (table[j / l->page_size] * l->page_size + j % l->page_size) * l->dim;
        for (long d = 0; d < l->dim; d += LANES, out += LANES) store(out, load_e4m3(row + d));
    }
}

static void attention_item(const void *data, long item) {
    const attention_job *p = data;
    const layer *l = p->of;
    const step *s = p->s;
    const int64_t *entry = s->blocks + item / l->heads * 3;
    long head = item % l->heads, row = entry[0], queries = entry[2], rows = queries * l->group;
    long packed = s->offsets[row] + entry[1], start = s->starts[row] + entry[1], end = start + queries;
    long plane = l->pages * l->page_size * l->dim;
    long first = first_visible(l, start) / LANES * LANES, width = (end - first + LANES - 1) / LANES * LANES + LANES;
    long expanded = p->is_e4m3 ? (end - first) * l->dim : 0;
    float *scores = take_scratch(rows * (width + l->dim) + 2 * expanded), *q = scores + rows * width;
    const int64_t *table = s->table + row * s->table_width, one_page = 0;
    const float *keys = (const float *)p->cache + head * plane, *values = keys + l->heads * plane;
    layer flat = *l;
    if (p->is_e4m3) { /* expanded into one page that is as long as the row: then all is as in fp32 */
        float *out = q + rows * l->dim;
        const uint8_t *narrow = (const uint8_t *)p->cache + head * plane;
        expand_rows(l, table, narrow, first, end, out);
        expand_rows(l, table, narrow + l->heads * plane, first, end, out + expanded);
        keys = out - first * l->dim;
        values = keys + expanded;
        flat.page_size = end;
        table = &one_page;
    }
    block b = {&flat, table, keys, values, first, width};

    for (long r = 0; r < rows; r++) {
        const float *source = p->q + (packed + r / l->group) * p->ldq + (head * l->group + r % l->group) * l->dim;
        for (long d = 0; d < l->dim; d += LANES) store(q + r * l->dim + d, load(source + d) * all(l->scale));
    }
    score(&b, q, rows, end, scores);
    for (long r = 0; r < rows; r += ROWS) {
        int count = rows - r < ROWS ? (int)(rows - r) : ROWS;
        long low[ROWS], high[ROWS];
        float total[ROWS], *out[ROWS];
        for (int i = 0; i < count; i++) {
            long query = (r + i) / l->group, position = start + query;
            low[i] = first_visible(l, position);
            high[i] = position + 1;
            long query_head = head * l->group + (r + i) % l->group;
            const float *sink = p->sinks ? p->sinks + query_head : NULL;
            total[i] = soften(&b, scores + (r + i) * width, low[i], position, sink);
            out[i] = p->out + ((packed + query) * l->heads * l->group + query_head) * l->dim;
        }
        long d = 0;
        for (; d + 4 * LANES <= l->dim; d += 4 * LANES)
            four_vectors[count](&b, scores + r * width, low, high, total, d, out);
        for (; d < l->dim; d += LANES) one_vector[count](&b, scores + r * width, low, high, total, d, out);
    }
}

void attention(const layer *of, const step *s, long items, const void *cache, int is_e4m3, const float *q, long ldq,
               const float *sinks, float *out) {
    attention_job p = {of, s, cache, is_e4m3, q, ldq, sinks, out};
    share(attention_item, &p, items);
}

/* Keys and values [n, heads, dim], rows ldk and ldv apart, to the slots [n] of a cache [2, heads, positions, dim]. */
void write_pages(long heads, long dim, long positions, float *cache, const int64_t *slots, long n, const float *k,
                 long ldk, const float *v, long ldv) {
    for (long i = 0; i < n; i++)
        for (long head = 0; head < heads; head++) {
            float *key = cache + (head * positions + slots[i]) * dim, *value = key + heads * positions * dim;
            memcpy(key, k + i * ldk + head * dim, dim * sizeof(float));
            memcpy(value, v + i * ldv + head * dim, dim * sizeof(float));
        }
}
