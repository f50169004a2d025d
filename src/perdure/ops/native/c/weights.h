/* How a weight [n, k] lies in memory: panels of 16 rows, and in a panel, k by k, the 16 rows' values side by side.

   Products read it in this order, one stream a panel. n is padded to whole panels; what the padding holds is never used.
   Values are fp32, bf16, fp16 or e4m3, or the codes and scales of a quantised file. `expand` gives the same fp32 values
   whichever it is, so a product has the same bits in all of them. */
#pragma once

#include <stdint.h>

#define PANEL 16
#define CHUNK 256 /* of k, expanded at once; a multiple of every block length */

enum { STORED_F32, STORED_BF16, STORED_F16, STORED_E4M3, STORED_BLOCKS };

/* A weight of blocks: value = d * sub * (code - center) - dmin * submin, with one d (and dmin) for `block` values of a
   row and one sub (and submin) for `group` of them. Without sub it is 1; without submin, dmin is added as it is. */
typedef struct {
    int block, group;
    int bits;    /* 4: two codes a byte, unsigned; 8: signed */
    int center;  /* of unsigned codes */
    int has_sub; /* second level of scales */
    int has_min;
    int source_bytes; /* of one block in a GGUF file */
} layout;

typedef struct {
    int stored;
    int kind; /* of blocks: index of its layout */
    long n, k;
    const void *data;
} weight;

const layout *layout_of(int kind);
long panel_bytes(int stored, int kind, long k);

/* fp32 values of k0 .. k0 + count - 1 of one panel, [count][PANEL]. count <= CHUNK; k0 a multiple of CHUNK. */
void expand(const weight *w, long panel, long k0, long count, float *out);
