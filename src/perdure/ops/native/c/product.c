/* y = x @ w.T + b, with the same bits for a row of x whatever other rows come with it.

   Every element of y is summed in one order: runs of k of a fixed length, each a chain of fused multiply-adds from its
   first k to its last, the runs added one after another, then the bias. How rows and panels are tiled, who computes
   what and how the weight is stored moves no bit. */
#include <stddef.h>

#include "pool.h"
#include "vector.h"
#include "weights.h"

#define ROWS 6         /* of x a tile holds: 12 sums, 2 weights and 1 factor fill 16 registers */
#define RUN 64         /* of k: short chains round less */
#define BLOCK_ROWS 192 /* of x an item takes: one chunk of them stays in the second cache */

typedef struct {
    weight w;
    const float *x;
    long m, ldx;
    const float *bias;
    float *y;
    long ldy;
    int panels; /* an item takes */
    long row_blocks;
} product_job;

/* A tile: R rows of x by P panels. w is [P][count][PANEL] of `type`, `step` of them from panel to panel. `ahead` is read
   soon. Few rows have too few sums to keep the multipliers busy: they take several panels at once. */
#define TILE(name, type, get, R, P)                                                                              \
    static void name##_##R##_##P(const float *x, long ldx, const void *weights, long step, long count, float *y, \
                                 long ldy, int first, const float *bias, const char *ahead, long stride) {       \
        const type *w = weights;                                                                                 \
vec acc[R][2 * P];                                                                                               \
        for (long from = 0; from < count; from += RUN) {                                                         \
            long to = from + RUN < count ? from + RUN : count;                                                   \
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < 2 * P; c++) acc[r][c] = all(0);        \
            for (long i = from; i < to; i++) {                                                                   \
                __builtin_prefetch(ahead + i * stride, 0, 2);                                                    \
                if (P == 1) {                                                                                    \
                    vec low = get(w + i * PANEL), high = get(w + i * PANEL + LANES);                             \
                    UNROLL for (int r = 0; r < R; r++) {                                                         \
                        vec factor = all(x[r * ldx + i]);                                                        \
                        acc[r][0] = fused(factor, low, acc[r][0]);                                               \
                        acc[r][1] = fused(factor, high, acc[r][1]);                                              \
                    }                                                                                            \
                } else {                                                                                         \
                    vec factor[R];                                                                               \
                    UNROLL for (int r = 0; r < R; r++) factor[r] = all(x[r * ldx + i]);                          \
                    UNROLL for (int c = 0; c < 2 * P; c++) {                                                     \
                        vec value = get(w + c / 2 * step + i * PANEL + c % 2 * LANES);                           \
                        UNROLL for (int r = 0; r < R; r++) acc[r][c] = fused(factor[r], value, acc[r][c]);       \
                    }                                                                                            \
                }                                                                                                \
            }                                                                                                    \
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < 2 * P; c++) {                          \
                float *at = y + r * ldy + c * LANES;                                                             \
                vec total = first && !from ? acc[r][c] : load(at) + acc[r][c];                                   \
                store(at, bias && to == count ? total + load(bias + c * LANES) : total);                         \
            }                                                                                                    \
        }                                                                                                        \
    }

typedef void (*tile)(const float *, long, const void *, long, long, float *, long, int, const float *, const char *, long);

#define TILES(name, type, get)                                                          \
    TILE(name, type, get, 1, 1)                                                         \
    TILE(name, type, get, 2, 1)                                                         \
    TILE(name, type, get, 3, 1)                                                         \
    TILE(name, type, get, 4, 1)                                                         \
    TILE(name, type, get, 5, 1)                                                         \
    TILE(name, type, get, 6, 1)                                                         \
    TILE(name, type, get, 1, 4)                                                         \
    TILE(name, type, get, 2, 2)                                                         \
    TILE(name, type, get, 3, 2)                                                         \
    static const tile name##_tiles[2][ROWS + 1] = {                                     \
        {NULL, name##_1_1, name##_2_1, name##_3_1, name##_4_1, name##_5_1, name##_6_1}, \
        {NULL, name##_1_4, name##_2_2, name##_3_2},                                     \
    };

TILES(f32, float, load)
TILES(bf16, uint16_t, load_bf16)
TILES(f16, uint16_t, load_f16)
TILES(e4m3, uint8_t, load_e4m3)

INLINE int panels_at_once(long rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

/* One chunk of k for rows m0 .. m1 - 1 and a whole panel; columns past n are cut off. */
static void panel_chunk(const product_job *p, const tile *tiles, long m0, long m1, long panel, long k0, long count,
                        const void *w, const float *bias, const char *ahead, long stride) {
    long n0 = panel * PANEL, width = p->w.n - n0;
    float edge[ROWS * PANEL], edge_bias[PANEL] = {0};
    if (width < PANEL && bias) memcpy(edge_bias, bias, width * sizeof(float));
    stride /= (m1 - m0 + ROWS - 1) / ROWS; /* each tile fetches its part */
    for (long m = m0; m < m1; m += ROWS, ahead += count * stride) {
        int rows = m1 - m < ROWS ? (int)(m1 - m) : ROWS;
        const float *x = p->x + m * p->ldx + k0;
        float *y = p->y + m * p->ldy + n0;
        if (width >= PANEL) {
            tiles[rows](x, p->ldx, w, 0, count, y, p->ldy, k0 == 0, bias, ahead, stride);
        } else {
            if (k0)
                for (int r = 0; r < rows; r++) memcpy(edge + r * PANEL, y + r * p->ldy, width * sizeof(float));
            tiles[rows](x, p->ldx, w, 0, count, edge, PANEL, k0 == 0, bias ? edge_bias : NULL, ahead, stride);
            for (int r = 0; r < rows; r++) memcpy(y + r * p->ldy, edge + r * PANEL, width * sizeof(float));
        }
    }
}

static void product_item(const void *data, long item) {
    const product_job *p = data;
    const weight *w = &p->w;
    long num_panels = (w->n + PANEL - 1) / PANEL, bytes = panel_bytes(w->stored, w->kind, w->k);
    long first = item / p->row_blocks * p->panels;
    long last = first + p->panels < num_panels ? first + p->panels : num_panels;
    long m0 = item % p->row_blocks * BLOCK_ROWS, m1 = m0 + BLOCK_ROWS < p->m ? m0 + BLOCK_ROWS : p->m;
    int at_once = panels_at_once(m1 - m0);
    /* Expanding pays where a tile's worth of weights is read several times. */
    int direct = w->stored == STORED_F32 || (w->stored != STORED_BLOCKS && m1 - m0 <= 3 * ROWS);
    const tile(*tiles)[ROWS + 1] = !direct || w->stored == STORED_F32 ? f32_tiles
                                   : w->stored == STORED_BF16         ? bf16_tiles
                                   : w->stored == STORED_F16          ? f16_tiles
                                                                      : e4m3_tiles;
    long size = w->stored == STORED_F32 ? 4 : w->stored == STORED_E4M3 ? 1 : 2;
    float expanded[4 * CHUNK * PANEL] __attribute__((aligned(64)));
    for (long panel = first; panel < last;) {
        int panels = last - panel >= at_once && (panel + at_once) * PANEL <= w->n ? at_once : 1;
        for (long k0 = 0; k0 < w->k; k0 += CHUNK) {
            long count = w->k - k0 < CHUNK ? w->k - k0 : CHUNK;
            const float *bias = p->bias && k0 + count == w->k ? p->bias + panel * PANEL : NULL;
            const void *values = expanded;
            const char *ahead = (const char *)expanded;
            long stride = 0;
            long step = CHUNK * PANEL;
            if (direct) {
                values = (const char *)w->data + panel * bytes + k0 * PANEL * size;
                ahead = (const char *)values + count * PANEL * size;
                stride = PANEL * size;
                step = w->k * PANEL;
            } else {
                for (int i = 0; i < panels; i++) expand(w, panel + i, k0, count, expanded + i * step);
            }
            if (panels == 1)
                panel_chunk(p, tiles[0], m0, m1, panel, k0, count, values, bias, ahead, stride);
            else
                tiles[1][m1 - m0](p->x + m0 * p->ldx + k0, p->ldx, values, step, count,
                                  p->y + m0 * p->ldy + panel * PANEL, p->ldy, k0 == 0, bias, ahead, stride);
        }
        panel += panels;
    }
}

/* x [m, k] with rows ldx apart, bias [n] or NULL, y [m, n] with rows ldy apart. */
void product(int stored, int kind, long n, long k, const void *weights, const float *x, long m, long ldx,
             const float *bias, float *y, long ldy) {
    long num_panels = (n + PANEL - 1) / PANEL;
    int panels = m <= 3 ? 4 : 2;
    long row_blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS;
    product_job p = {{stored, kind, n, k, weights}, x, m, ldx, bias, y, ldy, panels, row_blocks};
    share(product_item, &p, (num_panels + panels - 1) / panels * row_blocks);
}
