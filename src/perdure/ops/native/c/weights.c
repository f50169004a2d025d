#include "weights.h"

#include <stdlib.h>

#include "pool.h"
#include "vector.h"

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, NUM_KINDS };

/* In the order of the names in weights.py. */
static const layout layouts[NUM_KINDS] = {
    [Q4_0] = {32, 32, 4, 8, 0, 0, 18},      [Q4_1] = {32, 32, 4, 0, 0, 1, 20},
    [Q5_0] = {32, 32, 8, 0, 0, 0, 22},      [Q5_1] = {32, 32, 8, 0, 0, 1, 24},
    [Q8_0] = {32, 32, 8, 0, 0, 0, 34},      [Q2_K] = {256, 16, 4, 0, 1, 1, 84},
    [Q3_K] = {256, 16, 4, 4, 1, 0, 110},    [Q4_K] = {256, 32, 4, 0, 1, 1, 144},
    [Q5_K] = {256, 32, 8, 0, 1, 1, 176},    [Q6_K] = {256, 16, 8, 0, 1, 0, 210},
    [IQ4_NL] = {32, 32, 8, 0, 0, 0, 18},    [IQ4_XS] = {256, 32, 8, 0, 1, 0, 136},
};

const layout *layout_of(int kind) { return &layouts[kind]; }

/* ---- A block as it is in a file: its codes in order, its scales. The formats are ggml's. */

typedef struct {
    uint16_t d, dmin; /* fp16 bits */
    int8_t sub[16];
    uint8_t submin[16];
    int8_t code[256];
} block;

static const int8_t nonlinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static uint16_t half_at(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }

/* 16 bytes hold 32 codes: the low halves first. */
static void nibbles(const uint8_t *q, int half, int8_t *out) {
    for (int i = 0; i < half; i++) {
        out[i] = q[i] & 15;
        out[i + half] = q[i] >> 4;
    }
}

/* The eight 6-bit scales and minima of Q4_K and Q5_K in 12 bytes. */
static void six_bits(const uint8_t *q, block *b) {
    for (int i = 0; i < 4; i++) {
        b->sub[i] = q[i] & 63;
        b->submin[i] = q[i + 4] & 63;
        b->sub[i + 4] = (q[i + 8] & 15) | (q[i] >> 6 << 4);
        b->submin[i + 4] = (q[i + 8] >> 4) | (q[i + 4] >> 6 << 4);
    }
}

static void read_block(int kind, const uint8_t *at, block *b) {
    b->d = half_at(at);
    b->dmin = 0;
    switch (kind) {
    case Q4_0: nibbles(at + 2, 16, b->code); break;
    case Q4_1: b->dmin = half_at(at + 2); nibbles(at + 4, 16, b->code); break;
    case Q5_0:
    case Q5_1: {
        const uint8_t *high = at + 2 + 2 * (kind == Q5_1);
        if (kind == Q5_1) b->dmin = half_at(at + 2);
        nibbles(high + 4, 16, b->code);
        for (int i = 0; i < 32; i++) b->code[i] += (high[i / 8] >> i % 8 & 1) * 16 - 16 * (kind == Q5_0);
        break;
    }
    case Q8_0: memcpy(b->code, at + 2, 32); break;
    case Q2_K:
        for (int i = 0; i < 16; i++) { b->sub[i] = at[i] & 15; b->submin[i] = at[i] >> 4; }
        for (int i = 0; i < 256; i++) b->code[i] = at[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        b->d = half_at(at + 80);
        b->dmin = half_at(at + 82);
        break;
    case Q3_K: {
        const uint8_t *high = at, *low = at + 32, *scale = at + 96;
        for (int i = 0; i < 256; i++)
            b->code[i] = (low[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) | (high[i % 32] >> i / 32 & 1) << 2;
        for (int i = 0; i < 16; i++)
            b->sub[i] = ((scale[i % 8] >> i / 8 * 4 & 15) | (scale[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
        b->d = half_at(at + 108);
        break;
    }
    case Q4_K:
    case Q5_K: {
        const uint8_t *high = at + 16, *low = at + 16 + 32 * (kind == Q5_K);
        b->dmin = half_at(at + 2);
        six_bits(at + 4, b);
        for (int part = 0; part < 4; part++) nibbles(low + 32 * part, 32, b->code + 64 * part);
        if (kind == Q5_K)
            for (int i = 0; i < 256; i++) b->code[i] |= (high[i % 32] >> i / 32 & 1) << 4;
        break;
    }
    case Q6_K: {
        for (int i = 0; i < 256; i++) {
            int part = i / 128, quarter = i % 128 / 32, l = i % 32;
            int low = at[64 * part + quarter % 2 * 32 + l] >> quarter / 2 * 4 & 15;
            int high = at[128 + 32 * part + l] >> 2 * quarter & 3;
            b->code[i] = (int8_t)((low | high << 4) - 32);
        }
        memcpy(b->sub, at + 192, 16);
        b->d = half_at(at + 208);
        break;
    }
    case IQ4_NL:
        nibbles(at + 2, 16, b->code);
        for (int i = 0; i < 32; i++) b->code[i] = nonlinear[b->code[i]];
        break;
    case IQ4_XS:
        for (int i = 0; i < 8; i++) {
            nibbles(at + 8 + 16 * i, 16, b->code + 32 * i);
            b->sub[i] = ((at[4 + i / 2] >> i % 2 * 4 & 15) | (half_at(at + 2) >> 2 * i & 3) << 4) - 32;
        }
        for (int i = 0; i < 256; i++) b->code[i] = nonlinear[b->code[i]];
        break;
    }
}

/* ---- A block of 16 rows in a panel: d [16], dmin [16], then for each group sub [16], submin [16] and its codes. */

static long record_bytes(const layout *l) {
    long group = PANEL * l->group * l->bits / 8 + (l->has_sub ? PANEL * (1 + l->has_min) : 0);
    return 2 * PANEL * (1 + l->has_min) + l->block / l->group * group;
}

long panel_bytes(int stored, int kind, long k) {
    switch (stored) {
    case STORED_F32: return 4 * PANEL * k;
    case STORED_E4M3: return PANEL * k;
    case STORED_BLOCKS: return k / layouts[kind].block * record_bytes(&layouts[kind]);
    default: return 2 * PANEL * k;
    }
}

/* One row of a block into its column of the record. */
static void write_block(const layout *l, const block *b, int column, uint8_t *out) {
    memcpy(out + 2 * column, &b->d, 2);
    out += 2 * PANEL;
    if (l->has_min) {
        memcpy(out + 2 * column, &b->dmin, 2);
        out += 2 * PANEL;
    }
    for (int first = 0; first < l->block; first += l->group) {
        if (l->has_sub) {
            out[column] = (uint8_t)b->sub[first / l->group];
            out += PANEL;
            if (l->has_min) {
                out[column] = b->submin[first / l->group];
                out += PANEL;
            }
        }
        for (int i = first; i < first + l->group; i++) {
            if (l->bits == 8) {
                out[column] = (uint8_t)b->code[i];
                out += PANEL;
            } else { /* columns 0-7 in the low halves of 8 bytes, 8-15 in the high ones */
                int shift = column / 8 * 4;
                out[column % 8] = (uint8_t)((out[column % 8] & 0xf0 >> shift) | b->code[i] << shift);
                out += PANEL / 2;
            }
        }
    }
}

/* Rows of a file's blocks into panels, from row `first` of the weight on. */
typedef struct {
    int kind;
    long first, rows, k;
    const uint8_t *source;
    uint8_t *out;
} packing;

static void pack_panel(const void *data, long item) {
    const packing *p = data;
    const layout *l = &layouts[p->kind];
    long panel = p->first / PANEL + item, blocks = p->k / l->block;
    for (long row = panel * PANEL; row < (panel + 1) * PANEL; row++) {
        if (row < p->first || row >= p->first + p->rows) continue;
        const uint8_t *source = p->source + (row - p->first) * blocks * l->source_bytes;
        uint8_t *out = p->out + panel * panel_bytes(STORED_BLOCKS, p->kind, p->k);
        for (long i = 0; i < blocks; i++) {
            block b;
            read_block(p->kind, source + i * l->source_bytes, &b);
            write_block(l, &b, (int)(row % PANEL), out + i * record_bytes(l));
        }
    }
}

void pack_blocks(int kind, const uint8_t *source, long first, long rows, long k, uint8_t *out) {
    packing p = {kind, first, rows, k, source, out};
    share(pack_panel, &p, (first + rows + PANEL - 1) / PANEL - first / PANEL);
}

/* ---- Floats. */

typedef struct {
    int stored;
    long first, rows, k;
    const float *source;
    void *out;
} packing_floats;

static uint16_t narrowed(int stored, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (stored == STORED_BF16) return (uint16_t)(bits >> 16);
    uint32_t sign = bits >> 16 & 0x8000;
    float scaled = __builtin_fabsf(x) * (stored == STORED_F16 ? 0x1p-112f : 0x1p-120f);
    memcpy(&bits, &scaled, 4);
    return (uint16_t)(stored == STORED_F16 ? sign | bits >> 13 : sign >> 8 | (bits >> 20 & 0x7f));
}

static void pack_panel_of_floats(const void *data, long item) {
    const packing_floats *p = data;
    long panel = p->first / PANEL + item;
    long low = panel * PANEL > p->first ? panel * PANEL : p->first;
    long end = p->first + p->rows, high = (panel + 1) * PANEL < end ? (panel + 1) * PANEL : end;
    const float *source = p->source + (low - p->first) * p->k;
    long at = panel * PANEL * p->k + low % PANEL;
    for (long i = 0; i < p->k; i++)
        for (long r = 0; r < high - low; r++) {
            float x = source[r * p->k + i];
            if (p->stored == STORED_F32) ((float *)p->out)[at + i * PANEL + r] = x;
            else if (p->stored == STORED_E4M3) ((uint8_t *)p->out)[at + i * PANEL + r] = (uint8_t)narrowed(p->stored, x);
            else ((uint16_t *)p->out)[at + i * PANEL + r] = narrowed(p->stored, x);
        }
}

/* source [rows, k]: rows first .. first + rows - 1 of the weight. The caller has seen that narrowing loses nothing. */
void pack_floats(int stored, const float *source, long first, long rows, long k, void *out) {
    packing_floats p = {stored, first, rows, k, source, out};
    share(pack_panel_of_floats, &p, (first + rows + PANEL - 1) / PANEL - first / PANEL);
}

/* ---- Expansion. */

INLINE vec from_codes(const uint8_t *at) { return as_floats(load_i8(at)); }
INLINE vec from_bytes(const uint8_t *at) { return as_floats(load_u8(at)); }

/* k0 is at the start of a block. */
INLINE void expand_blocks(const layout *l, const uint8_t *at, long count, float *out) {
    for (long done = 0; done < count; done += l->block) {
        vec d[2], dmin[2] = {all(0), all(0)};
        for (int h = 0; h < 2; h++) d[h] = load_f16((const uint16_t *)at + LANES * h);
        at += 2 * PANEL;
        if (l->has_min) {
            for (int h = 0; h < 2; h++) dmin[h] = load_f16((const uint16_t *)at + LANES * h);
            at += 2 * PANEL;
        }
        for (int group = 0; group < l->block; group += l->group) {
            vec scale[2], offset[2];
            for (int h = 0; h < 2; h++) {
                scale[h] = l->has_sub ? d[h] * from_codes(at + 8 * h) : d[h];
                offset[h] = dmin[h] - scale[h] * all((float)l->center);
            }
            if (l->has_sub) {
                at += PANEL;
                if (l->has_min) {
                    for (int h = 0; h < 2; h++) offset[h] = -(dmin[h] * from_bytes(at + 8 * h));
                    at += PANEL;
                }
            }
            for (int i = 0; i < l->group; i++, out += PANEL) {
                vec code[2];
                if (l->bits == 8) {
                    code[0] = from_codes(at);
                    code[1] = from_codes(at + 8);
                    at += PANEL;
                } else {
                    ivec both = load_u8(at);
                    code[0] = as_floats(both & 15);
                    code[1] = as_floats(both >> 4);
                    at += PANEL / 2;
                }
                store(out, fused(code[0], scale[0], offset[0]));
                store(out + 8, fused(code[1], scale[1], offset[1]));
            }
        }
    }
}

/* One copy of the loop for each layout, with its numbers known to the compiler. */
static void expand_kind(int kind, const uint8_t *at, long count, float *out) {
    switch (kind) {
#define CASE(name) case name: expand_blocks(&layouts[name], at, count, out); return;
        CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q2_K)
        CASE(Q3_K) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K) CASE(IQ4_NL) CASE(IQ4_XS)
#undef CASE
    }
}

void expand(const weight *w, long panel, long k0, long count, float *out) {
    const uint8_t *at = (const uint8_t *)w->data + panel * panel_bytes(w->stored, w->kind, w->k);
    if (w->stored == STORED_F32) {
        memcpy(out, at + 4 * PANEL * k0, 4 * PANEL * count);
    } else if (w->stored == STORED_E4M3) {
        for (long i = 0; i < PANEL * count; i += LANES) store(out + i, load_e4m3(at + PANEL * k0 + i));
    } else if (w->stored == STORED_BLOCKS) {
        const layout *l = &layouts[w->kind];
        expand_kind(w->kind, at + k0 / l->block * record_bytes(l), count, out);
    } else {
        const uint16_t *bits = (const uint16_t *)(at + 2 * PANEL * k0);
        if (w->stored == STORED_BF16)
            for (long i = 0; i < PANEL * count; i += LANES) store(out + i, load_bf16(bits + i));
        else
            for (long i = 0; i < PANEL * count; i += LANES) store(out + i, load_f16(bits + i));
    }
}

/* Whole rows of a weight, by their numbers: out [count, k]. For embeddings. */
typedef struct {
    const weight *w;
    const int64_t *ids;
    float *out;
} lookup;

static void look_up(const void *data, long item) {
    const lookup *l = data;
    float values[CHUNK * PANEL];
    for (long k0 = 0; k0 < l->w->k; k0 += CHUNK) {
        long count = l->w->k - k0 < CHUNK ? l->w->k - k0 : CHUNK;
        expand(l->w, l->ids[item] / PANEL, k0, count, values);
        for (long i = 0; i < count; i++) l->out[item * l->w->k + k0 + i] = values[i * PANEL + l->ids[item] % PANEL];
    }
}

void rows_of(int stored, int kind, long n, long k, const void *weights, const int64_t *ids, long count, float *out) {
    weight w = {stored, kind, n, k, weights};
    lookup l = {&w, ids, out};
    share(look_up, &l, count);
}
