/* Functions of rows: norms, activations, rotation. An element's bits depend on its own row alone. */
#include <math.h>

#include "pool.h"
#include "vector.h"

#define ITEM 8192 /* elements worth an item of their own */

static long rows_an_item(long width) { return width >= ITEM ? 1 : ITEM / width; }

/* y[i, j] = weight[j] * x[i, j] / sqrt(mean(x[i, j]^2) + eps), with x [m, heads, k], rows ldx apart, y dense and
   weight [heads, k], or [k] for all heads if one_weight. */
typedef struct {
    const float *x;
    long m, ldx, heads, k;
    const float *weight;
    int one_weight;
    float eps;
    float *y;
    long rows;
} norm_job;

/* In four chains, added up in double: an error here is an error of the whole row. */
static double squares(const float *x, long k) {
    vec chain[4] = {all(0), all(0), all(0), all(0)};
    long j = 0;
    for (int next = 0; j + LANES <= k; j += LANES, next = (next + 1) % 4)
        chain[next] = fused(load(x + j), load(x + j), chain[next]);
    if (j < k) chain[0] = fused(load_some(x + j, k - j), load_some(x + j, k - j), chain[0]);
    double total = 0;
    for (int i = 0; i < 4; i++)
        for (int lane = 0; lane < LANES; lane++) total += (double)chain[i][lane];
    return total;
}

static void norm_item(const void *data, long item) {
    const norm_job *p = data;
    long whole = p->k / LANES * LANES, left = p->k - whole;
    for (long i = item * p->rows; i < (item + 1) * p->rows && i < p->m; i++)
        for (long head = 0; head < p->heads; head++) {
            const float *x = p->x + i * p->ldx + head * p->k;
            const float *weight = p->weight + (p->one_weight ? 0 : head * p->k);
            float *y = p->y + (i * p->heads + head) * p->k;
            float factor = (float)(1.0 / sqrt(squares(x, p->k) / (double)p->k + (double)p->eps));
            for (long j = 0; j < whole; j += LANES) store(y + j, load(x + j) * all(factor) * load(weight + j));
            if (left)
                store_some(y + whole, load_some(x + whole, left) * all(factor) * load_some(weight + whole, left), left);
        }
}

void rms_norm(const float *x, long m, long ldx, long heads, long k, const float *weight, int one_weight, float eps,
              float *y) {
    norm_job p = {x, m, ldx, heads, k, weight, one_weight, eps, y, rows_an_item(heads * k)};
    share(norm_item, &p, (m + p.rows - 1) / p.rows);
}

/* y = activation(gate) * up, from rows of gate_up [m, 2 k], gates first. */
typedef struct {
    const float *gate_up;
    long m, ld, k;
    int gelu;
    float *y;
    long rows;
} gate_job;

INLINE vec silu(vec x) { return x / (all(1) + exponential(-x)); }

/* x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3) */
INLINE vec gelu_tanh(vec x) {
    vec u = x * (all(1) + all(0.044715f) * x * x) * all(-1.5957691216057308f);
    return x / (all(1) + exponential(u));
}

static void gate_item(const void *data, long item) {
    const gate_job *p = data;
    long whole = p->k / LANES * LANES, left = p->k - whole;
    for (long i = item * p->rows; i < (item + 1) * p->rows && i < p->m; i++) {
        const float *gate = p->gate_up + i * p->ld, *up = gate + p->k;
        float *y = p->y + i * p->k;
        for (long j = 0; j < whole; j += LANES) {
            vec g = load(gate + j);
            store(y + j, (p->gelu ? gelu_tanh(g) : silu(g)) * load(up + j));
        }
        if (left) {
            vec g = load_some(gate + whole, left);
            store_some(y + whole, (p->gelu ? gelu_tanh(g) : silu(g)) * load_some(up + whole, left), left);
        }
    }
}

void gate(const float *gate_up, long m, long ld, long k, int gelu, float *y) {
    gate_job p = {gate_up, m, ld, k, gelu, y, rows_an_item(4 * k)};
    share(gate_item, &p, (m + p.rows - 1) / p.rows);
}

/* Turns the first `turning` elements of each head of x [m, heads, k], rows ldx apart, by cos and signed sin
   [m, turning]; y is dense. */
typedef struct {
    const float *x;
    long m, ldx, heads, k;
    const float *cos, *sin;
    long turning;
    float *y;
    long rows;
} turn_job;

static void turn_item(const void *data, long item) {
    const turn_job *p = data;
    long half = p->turning / 2;
    for (long i = item * p->rows; i < (item + 1) * p->rows && i < p->m; i++) {
        const float *cos = p->cos + i * p->turning, *sin = p->sin + i * p->turning;
        for (long head = 0; head < p->heads; head++) {
            const float *x = p->x + i * p->ldx + head * p->k;
            float *y = p->y + (i * p->heads + head) * p->k;
            for (long j = 0; j < half; j++) {
                y[j] = x[j] * cos[j] + x[j + half] * sin[j];
                y[j + half] = x[j + half] * cos[j + half] + x[j] * sin[j + half];
            }
            if (p->turning < p->k) memcpy(y + p->turning, x + p->turning, (p->k - p->turning) * sizeof(float));
        }
    }
}

void rotate(const float *x, long m, long ldx, long heads, long k, const float *cos, const float *sin, long turning,
            float *y) {
    turn_job p = {x, m, ldx, heads, k, cos, sin, turning, y, rows_an_item(heads * k)};
    share(turn_item, &p, (m + p.rows - 1) / p.rows);
}
