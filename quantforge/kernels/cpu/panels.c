/* Linear layers on packed 4-bit and 8-bit weights, for one output: y[m, n] = sum_k w[n, k] x[m, k] + bias[n].

   One source for every processor: GCC's vector extensions, as wide as the flags allow, and intrinsics only where integer
   dot products have an instruction. Plain C: no OpenMP, no torch; the caller lends its thread pool (`struct matrix`).

   Layout (quantforge/kernels/panels.py): a panel is 16 output rows. Of each panel, word after word along k, 16 words of 32
   bits lie side by side, one a row. A word holds 8 codes of 4 bits (k = 0 4 1 5 2 6 3 7 from the lowest bits up) or 4 codes
   of 8 bits (k = 0 1 2 3). Scales and zeros are [panel][group][16]. w = (code - zero) * scale.

   Activations come in as floats. Either they are multiplied as such, or, where that is faster, they become integers of 24
   bits for each group of inputs (a step is 2^-23 of the largest, so no more is lost than float32 arithmetic loses), three
   digits of 8 bits, multiplied by the codes in 8-bit integer products. With `integers` one digit of 8 bits is all there is.
   Nothing here saturates: products are summed in 32 bits, or in 16 where they fit. */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define ROWS 16
#if defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define PARTS (ROWS / LANES)
#define CHUNK 256       /* k decoded at once; k that share a step of 24-bit activations, at most */
#define BLOCK 64        /* tokens taken at once */
#define LONGEST 32768   /* k summed in 32-bit integers at once: 32768 * 255 * 128 < 2^31 */
#define DIGITS 3
#ifndef AHEAD
#define AHEAD 1024
#endif
#define INLINE static inline __attribute__((always_inline))
#define SHARES 4 /* pieces of work for each thread */

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint8_t vb __attribute__((vector_size(LANES)));

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef void (*pool)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */

struct matrix {
    const uint32_t *words; /* [panels][words of a row][16] */
    const void *scales;    /* [panels][groups][16] of scale_type */
    const uint8_t *zeros;  /* [panels][groups][16], or NULL: the middle code */
    const void *bias;      /* [out_features] of x_type, or NULL */
    pool parallel;         /* NULL: threads are started for each call */
    int64_t bits, out_features, in_features, group_size; /* bits: 4 or 8; group_size: in whole words */
    int64_t scale_type, x_type, integers;                /* integers: x is rounded to 8 bits */
};

struct piece { int64_t from, to, group; }; /* a run of k inside a group */

struct work {
    const struct matrix *w;
    const void *in;                    /* [tokens][in_features] of x_type */
    void *y;                           /* [tokens][out_features] of x_type; transposed: [in_features][width] */
    int64_t threads;
    int bits, digits, block;           /* digits: of an activation, 0 while it is a float; block: tokens in it */
    int64_t padded, groups, first;     /* k in whole words; scales of a row; first token of the block */
    struct piece *pieces;
    int64_t count;                     /* pieces of a row */
    float *x, *sums;                   /* [block][padded]; [block][count]: sums of x over each piece, in steps */
    float *steps;                      /* [block][count]: what an integer stands for */
    int8_t *xq;                        /* [digits][block][padded] */
    int64_t panels, next, shares;
    int64_t column, width;             /* transposed: columns of y */
    void (*panel)(struct work *, int64_t);
};

/* ------------------------------------------------------------------------------------------------ numbers */

INLINE float from_bfloat16(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }

INLINE uint16_t to_bfloat16(float f) {
    uint32_t u; memcpy(&u, &f, 4);
    if (f != f) return (uint16_t)(u >> 16 | 64);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

#if defined(__F16C__)
INLINE float from_float16(uint16_t h) { return _cvtsh_ss(h); }
INLINE uint16_t to_float16(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
#else
INLINE float from_float16(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13; float f; memcpy(&f, &magnitude, 4);
    f = (h & 0x7c00) == 0x7c00 ? ((h & 0x3ff) ? NAN : INFINITY) : f * 0x1p112f;
    return h & 0x8000 ? -f : f;
}
INLINE uint16_t to_float16(float f) {
    uint32_t u; memcpy(&u, &f, 4);
    uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
    float a = fabsf(f);
    if (a != a) return sign | 0x7e00;
    if (a >= 65520.0f) return sign | 0x7c00;
    if (a < 0x1p-14f) return sign | (uint16_t)lrintf(a * 0x1p24f); /* subnormal; 2^-14 comes out right as well */
    u &= 0x7fffffff;
    return sign | (uint16_t)((u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13);
}
#endif

INLINE float load_number(const void *p, int64_t i, int64_t type) {
    if (type == FLOAT32) return ((const float *)p)[i];
    return type == BFLOAT16 ? from_bfloat16(((const uint16_t *)p)[i]) : from_float16(((const uint16_t *)p)[i]);
}

INLINE void store_number(void *p, int64_t i, float f, int64_t type) {
    if (type == FLOAT32) ((float *)p)[i] = f;
    else ((uint16_t *)p)[i] = type == BFLOAT16 ? to_bfloat16(f) : to_float16(f);
}

INLINE vf load_scales(const struct matrix *w, int64_t at) {
    vf f;
    if (w->scale_type == FLOAT32) { memcpy(&f, (const float *)w->scales + at, sizeof f); return f; }
    vh h; memcpy(&h, (const uint16_t *)w->scales + at, sizeof h);
    if (w->scale_type == BFLOAT16) { vu u = __builtin_convertvector(h, vu) << 16; memcpy(&f, &u, sizeof f); return f; }
#if defined(__AVX512BW__)
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#else
    for (int i = 0; i < LANES; i++) f[i] = from_float16(h[i]);
    return f;
#endif
}

INLINE vi load_zeros(const struct work *k, int64_t at) {
    if (k->w->zeros == NULL) return (vi){} + (1 << (k->bits - 1));
#if defined(__AVX512BW__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(k->w->zeros + at)));
#elif defined(__AVX2__) /* compilers take the general way apart */
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(k->w->zeros + at)));
#else
    vb b; memcpy(&b, k->w->zeros + at, sizeof b);
    return __builtin_convertvector(b, vi);
#endif
}

INLINE vu load_words(const uint32_t *p) { vu v; __builtin_prefetch(p + AHEAD); memcpy(&v, p, sizeof v); return v; }

/* ------------------------------------------------------------------------------------------------ codes */

/* Of the i-th code of a word: its place along k. */
INLINE int place(int bits, int i) { return bits == 8 ? i : (i >> 1) + 4 * (i & 1); }

/* The i-th codes of a vector of words, as floats, times 16^i or 256^i but for the last; exact. Activations are divided by
   the same power of two (`power`), which spares a shift. */
INLINE vf lifted(int bits, vu v, int i) {
    vu code = i == 32 / bits - 1 ? v >> (32 - bits) : v & (((1u << bits) - 1) << (bits * i));
    return __builtin_convertvector((vi)code, vf);
}
INLINE float power(int bits, int i) { return i == 32 / bits - 1 ? 1.0f : 1.0f / (float)(1u << (bits * i)); }

/* ------------------------------------------------------------------------------------------------ float activations */

/* Up to 4 tokens at once, straight from the words. */
INLINE void direct(struct work *k, const int bits, const int tokens, int64_t panel, int token, vf out[][PARTS]) {
    const int codes = 32 / bits, chains = tokens == 1 ? 4 : tokens == 2 ? 2 : 1;
    const uint32_t *words = k->w->words + panel * ROWS * (k->padded / codes);
    const float *x = k->x + token * k->padded;
    for (int m = 0; m < tokens; m++) for (int p = 0; p < PARTS; p++) out[m][p] = (vf){};
    for (int64_t n = 0; n < k->count; n++) {
        const int64_t from = k->pieces[n].from, to = k->pieces[n].to, g = k->pieces[n].group;
        for (int p = 0; p < PARTS; p++) {
            vf sum[4][4];
            for (int m = 0; m < tokens; m++) for (int j = 0; j < chains; j++) sum[m][j] = (vf){};
            for (int64_t at = from; at < to; at += codes) {
                vu v = load_words(words + at / codes * ROWS + p * LANES);
#pragma GCC unroll 8
                for (int i = 0; i < codes; i++) {
                    vf q = lifted(bits, v, i);
                    for (int m = 0; m < tokens; m++) sum[m][i % chains] += q * x[m * k->padded + at + place(bits, i)];
                }
            }
            int64_t corner = (panel * k->groups + g) * ROWS + p * LANES;
            vf scale = load_scales(k->w, corner), zero = __builtin_convertvector(load_zeros(k, corner), vf);
            for (int m = 0; m < tokens; m++) {
                vf s = sum[m][0];
                for (int j = 1; j < chains; j++) s += sum[m][j];
                out[m][p] += scale * (s - zero * k->sums[(token + m) * k->count + n]);
            }
        }
    }
}

/* (code - zero) * scale of k from..to of a panel, [to - from][16]; the codes are whole, so only the product rounds. */
INLINE void decode(struct work *k, const int bits, int64_t panel, int64_t from, int64_t to, float *out) {
    const int codes = 32 / bits;
    const uint32_t *words = k->w->words + panel * ROWS * (k->padded / codes);
    while (from < to) {
        int64_t g = from / k->w->group_size, end = (g + 1) * k->w->group_size;
        if (end > to) end = to;
        for (int p = 0; p < PARTS; p++) {
            int64_t corner = (panel * k->groups + g) * ROWS + p * LANES;
            vf scale = load_scales(k->w, corner);
            vi zero = load_zeros(k, corner);
            for (int64_t at = from; at < end; at += codes) {
                vu v = load_words(words + at / codes * ROWS + p * LANES);
#pragma GCC unroll 8
                for (int i = 0; i < codes; i++) {
                    vf w = __builtin_convertvector((vi)(v >> (bits * i) & ((1u << bits) - 1)) - zero, vf) * scale;
                    memcpy(out + (at - from + place(bits, i)) * ROWS + p * LANES, &w, sizeof w);
                }
            }
        }
        out += (end - from) * ROWS;
        from = end;
    }
}

/* sums[m] += x[m][from..to] . w, with w [to - from][16] decoded. */
INLINE void multiply(struct work *k, const int tokens, int token, int64_t from, int64_t to, const float *w, vf sums[][PARTS]) {
    const float *x = k->x + token * k->padded;
    vf sum[8][PARTS];
    for (int m = 0; m < tokens; m++) for (int p = 0; p < PARTS; p++) sum[m][p] = sums[token + m][p];
    for (int64_t at = from; at < to; at++, w += ROWS) {
        vf row[PARTS];
        memcpy(row, w, sizeof row);
        for (int m = 0; m < tokens; m++) {
            float value = x[m * k->padded + at];
            for (int p = 0; p < PARTS; p++) sum[m][p] += row[p] * value;
        }
    }
    for (int m = 0; m < tokens; m++) for (int p = 0; p < PARTS; p++) sums[token + m][p] = sum[m][p];
}
#if LANES == 16
#define AT_ONCE 8
#else
#define AT_ONCE 4
#endif

static void store_rows(struct work *k, int64_t panel, vf sums[][PARTS]) {
    const struct matrix *w = k->w;
    int64_t left = w->out_features - panel * ROWS, rows = left < ROWS ? left : ROWS;
    for (int m = 0; m < k->block; m++) {
        float values[ROWS];
        memcpy(values, sums[m], sizeof values);
        for (int64_t r = 0; r < rows; r++) {
            float bias = w->bias == NULL ? 0.0f : load_number(w->bias, panel * ROWS + r, w->x_type);
            store_number(k->y, (k->first + m) * w->out_features + panel * ROWS + r, values[r] + bias, w->x_type);
        }
    }
}

INLINE void float_panel(struct work *k, const int bits, int64_t panel) {
    vf sums[BLOCK][PARTS];
    switch (k->block) {
    case 1: direct(k, bits, 1, panel, 0, sums); break;
    case 2: direct(k, bits, 2, panel, 0, sums); break;
    case 3: direct(k, bits, 3, panel, 0, sums); break;
    case 4: direct(k, bits, 4, panel, 0, sums); break;
    default: {
        float decoded[CHUNK * ROWS] __attribute__((aligned(64)));
        memset(sums, 0, sizeof(vf) * PARTS * k->block);
        for (int64_t from = 0; from < k->padded; from += CHUNK) {
            int64_t to = from + CHUNK < k->padded ? from + CHUNK : k->padded;
            decode(k, bits, panel, from, to, decoded);
            int m = 0;
            for (; m + AT_ONCE <= k->block; m += AT_ONCE) multiply(k, AT_ONCE, m, from, to, decoded, sums);
            for (; m + 2 <= k->block; m += 2) multiply(k, 2, m, from, to, decoded, sums);
            for (; m < k->block; m++) multiply(k, 1, m, from, to, decoded, sums);
        }
    }
    }
    store_rows(k, panel, sums);
}
static void float_panel4(struct work *k, int64_t panel) { float_panel(k, 4, panel); }
static void float_panel8(struct work *k, int64_t panel) { float_panel(k, 8, panel); }

/* y is [in_features][width]: columns `column` .. `column + width` of the transposed weight, of x_type. */
INLINE void transposed_panel(struct work *k, const int bits, int64_t panel) {
    float decoded[CHUNK * ROWS] __attribute__((aligned(64)));
    int64_t left = k->width - (panel * ROWS - k->column), rows = left < ROWS ? left : ROWS;
    for (int64_t from = 0; from < k->padded; from += CHUNK) {
        int64_t to = from + CHUNK < k->padded ? from + CHUNK : k->padded;
        decode(k, bits, panel, from, to, decoded);
        for (int64_t at = from; at < to && at < k->w->in_features; at++) {
            const float *row = decoded + (at - from) * ROWS;
            int64_t where = at * k->width + panel * ROWS - k->column;
            if (k->w->x_type == FLOAT32) { memcpy((float *)k->y + where, row, 4 * rows); continue; }
            uint16_t stored[ROWS];
            if (k->w->x_type == BFLOAT16) for (int r = 0; r < ROWS; r++) { /* finite: no branch, so that it is vectorized */
                uint32_t u; memcpy(&u, row + r, 4);
                stored[r] = (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
            }
            else for (int r = 0; r < ROWS; r++) stored[r] = to_float16(row[r]);
            if (rows == ROWS) memcpy((uint16_t *)k->y + where, stored, sizeof stored); /* of known size: one store */
            else memcpy((uint16_t *)k->y + where, stored, 2 * rows);
        }
    }
}
static void transposed_panel4(struct work *k, int64_t panel) { transposed_panel(k, 4, panel); }
static void transposed_panel8(struct work *k, int64_t panel) { transposed_panel(k, 8, panel); }

/* ------------------------------------------------------------------------------------------------ integer activations */

INLINE int32_t load4(const int8_t *x) { int32_t four; memcpy(&four, x, 4); return four; }

#if (defined(__AVX512VNNI__) && LANES == 16) || (defined(__AVXVNNI__) && LANES == 8)
#define FAST_BYTES 1
#else
#define FAST_BYTES 0
#endif
#define AS_DIGITS(bits, tokens) (FAST_BYTES || (LANES == 8 && bits == 4 && tokens <= 4)) /* digits are the faster way */

/* sum += for each lane the dot product of 4 unsigned bytes of w with the 4 signed bytes at x. */
INLINE vi dot4(vi sum, vu w, const int8_t *x) {
#if FAST_BYTES && LANES == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(load4(x)));
#elif FAST_BYTES
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(load4(x)));
#elif LANES == 8
    __m256i b = _mm256_set1_epi32(load4(x)), v = (__m256i)w;
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(v, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    return sum + (vi)even + (vi)_mm256_madd_epi16(_mm256_srli_epi16(v, 8), _mm256_srai_epi16(b, 8));
#else
    for (int j = 0; j < 4; j++) sum += (vi)(w >> (8 * j) & 255) * (int32_t)x[j];
    return sum;
#endif
}

#define LOW(v) ((v) & 0x0f0f0f0f)
#define HIGH(v) ((v) >> 4 & 0x0f0f0f0f)

#if LANES == 8 && !FAST_BYTES
/* Keeps the compiler from adding up later what it then has no registers for. */
INLINE vi in_order(vi v) { __asm__("" : "+x"(v)); return v; }

/* sums[p][m][d] += codes of 4 bits times digit d of token m, 32 of k at a time; returns where the rest begins. Sums of 8 times
   two products fit 16 bits: 16 * 15 * 128 < 2^15. */
INLINE int64_t nibbles(struct work *k, const int digits, const int tokens, const uint32_t *words, int token, int64_t at,
                       int64_t to, vi sums[][8][DIGITS]) {
    const int together = tokens == 1 ? PARTS : 1; /* parts that share what is loaded of x */
    const int64_t plane = (int64_t)k->block * k->padded;
    const int8_t *x = k->xq + token * k->padded;
    for (; at + 32 <= to; at += 32) for (int q = 0; q < PARTS; q += together) for (int m = 0; m < tokens; m++) {
        vi pairs[PARTS][DIGITS];
#pragma GCC unroll 4
        for (int w = 0; w < 4; w++) {
            vu v[PARTS];
            const uint32_t *from = words + (at / 8 + w) * ROWS + q * LANES;
            __builtin_prefetch(from + AHEAD); /* all parts lie in one line of the cache */
            for (int p = 0; p < together; p++) memcpy(&v[p], from + p * LANES, sizeof v[p]);
            for (int half = 0; half < 2; half++) for (int d = 0; d < digits; d++) {
                const __m256i four = _mm256_set1_epi32(load4(x + d * plane + m * k->padded + at + 8 * w + 4 * half));
                for (int p = 0; p < together; p++) {
                    vi two = (vi)_mm256_maddubs_epi16((__m256i)(half ? HIGH(v[p]) : LOW(v[p])), four);
                    pairs[p][d] = w + half == 0 ? two : in_order((vi)_mm256_add_epi16((__m256i)pairs[p][d], (__m256i)two));
                }
            }
        }
        for (int p = 0; p < together; p++) for (int d = 0; d < digits; d++)
            sums[q + p][m][d] += (vi)_mm256_madd_epi16((__m256i)pairs[p][d], _mm256_set1_epi16(1));
    }
    return at;
}
#endif

/* sums[p][m][d] += codes of k from..to times digit d of token m. */
INLINE void dots(struct work *k, const int bits, const int digits, const int tokens, const uint32_t *words, int token,
                 int64_t from, int64_t to, vi sums[][8][DIGITS]) {
    const int codes = 32 / bits;
    const int64_t plane = (int64_t)k->block * k->padded;
    const int8_t *x = k->xq + token * k->padded;
#if LANES == 8 && !FAST_BYTES
    if (bits == 4 && (from = nibbles(k, digits, tokens, words, token, from, to, sums)) == to) return;
#endif
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) {
        vi own[8][DIGITS], more[8][DIGITS]; /* two chains where there are few; in registers */
        for (int m = 0; m < tokens; m++) for (int d = 0; d < digits; d++) { own[m][d] = sums[p][m][d]; more[m][d] = (vi){}; }
        for (int64_t at = from; at < to; at += codes) {
            vu v = load_words(words + at / codes * ROWS + p * LANES);
            for (int m = 0; m < tokens; m++) for (int d = 0; d < digits; d++) {
                const int8_t *xm = x + d * plane + m * k->padded + at;
                if (bits == 8) { own[m][d] = dot4(own[m][d], v, xm); continue; }
                own[m][d] = dot4(own[m][d], LOW(v), xm);
                if (tokens <= 2) more[m][d] = dot4(more[m][d], HIGH(v), xm + 4);
                else own[m][d] = dot4(own[m][d], HIGH(v), xm + 4);
            }
        }
        for (int m = 0; m < tokens; m++) for (int d = 0; d < digits; d++) sums[p][m][d] = own[m][d] + more[m][d];
    }
}

INLINE void integer(struct work *k, const int bits, const int digits, const int tokens, int64_t panel, int token, vf out[][PARTS]) {
    const uint32_t *words = k->w->words + panel * ROWS * (k->padded / (32 / bits));
    for (int m = 0; m < tokens; m++) for (int p = 0; p < PARTS; p++) out[token + m][p] = (vf){};
    for (int64_t n = 0; n < k->count; n++) {
        vi sums[PARTS][8][DIGITS];
        for (int p = 0; p < PARTS; p++) for (int m = 0; m < tokens; m++) for (int d = 0; d < digits; d++) sums[p][m][d] = (vi){};
        dots(k, bits, digits, tokens, words, token, k->pieces[n].from, k->pieces[n].to, sums);
        const int64_t corner = (panel * k->groups + k->pieces[n].group) * ROWS;
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; p++) {
            vf scale = load_scales(k->w, corner + p * LANES);
            vi zero = load_zeros(k, corner + p * LANES);
            for (int m = 0; m < tokens; m++) {
                int64_t where = (token + m) * k->count + n;
                const vi *sum = sums[p][m];
                vf whole;
                if (digits == 1) whole = __builtin_convertvector(sum[0] - zero * (int32_t)k->sums[where], vf);
                else {
                    whole = __builtin_convertvector(sum[2], vf) * 65536.0f + (__builtin_convertvector(sum[1], vf) * 256.0f + __builtin_convertvector(sum[0], vf));
                    whole -= __builtin_convertvector(zero, vf) * k->sums[where];
                }
                out[token + m][p] += whole * (scale * k->steps[where]);
            }
        }
    }
}

INLINE void integer_panel(struct work *k, const int bits, const int digits, int64_t panel) {
    vf sums[BLOCK][PARTS];
    int m = 0;
    for (; m + AT_ONCE <= k->block; m += AT_ONCE) integer(k, bits, digits, AT_ONCE, panel, m, sums);
    for (; m + 2 <= k->block; m += 2) integer(k, bits, digits, 2, panel, m, sums);
    for (; m < k->block; m++) integer(k, bits, digits, 1, panel, m, sums);
    store_rows(k, panel, sums);
}
static void integer_panel4(struct work *k, int64_t panel) { integer_panel(k, 4, 1, panel); }
static void integer_panel8(struct work *k, int64_t panel) { integer_panel(k, 8, 1, panel); }
static void digits_panel4(struct work *k, int64_t panel) { integer_panel(k, 4, DIGITS, panel); }
static void digits_panel8(struct work *k, int64_t panel) { integer_panel(k, 8, DIGITS, panel); }

/* ------------------------------------------------------------------------------------------------ activations */

/* One token as floats, padded with zeros. */
static void load_token(const struct work *k, int64_t token, float *out) {
    int64_t n = k->w->in_features, row = token * n;
    if (k->w->x_type == FLOAT32) memcpy(out, (const float *)k->in + row, 4 * n);
    else if (k->w->x_type == BFLOAT16) for (int64_t i = 0; i < n; i++) out[i] = from_bfloat16(((const uint16_t *)k->in)[row + i]);
    else for (int64_t i = 0; i < n; i++) out[i] = from_float16(((const uint16_t *)k->in)[row + i]);
    for (int64_t i = n; i < k->padded; i++) out[i] = 0.0f;
}

/* The block as floats; made up for lifted codes when they are multiplied as they are. */
static void prepare_floats(struct work *k, int lift) {
    const int codes = 32 / k->bits;
    float powers[8];
    for (int i = 0; i < codes; i++) powers[place(k->bits, i)] = power(k->bits, i);
    for (int m = 0; m < k->block; m++) {
        float *x = k->x + m * k->padded;
        load_token(k, k->first + m, x);
        if (!lift) continue;
        for (int64_t n = 0; n < k->count; n++) {
            float parts[4] = {0};
            for (int64_t i = k->pieces[n].from; i < k->pieces[n].to; i += 4) for (int j = 0; j < 4; j++) parts[j] += x[i + j];
            k->sums[m * k->count + n] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
        }
        for (int64_t i = 0; i < k->padded; i += codes) for (int j = 0; j < codes; j++) x[i + j] *= powers[j];
    }
}

/* Largest magnitude, or NaN when some value is none or infinite. */
static float largest_of(const float *x, int64_t count) {
    uint32_t most = 0; /* magnitudes are ordered as their bits are */
    for (int64_t i = 0; i < count; i++) {
        uint32_t u; memcpy(&u, x + i, 4);
        u &= 0x7fffffff;
        most = u > most ? u : most;
    }
    float f; memcpy(&f, &most, 4);
    return most >= 0x7f800000 ? NAN : f;
}

/* The block as integers, half to even. Three digits: steps of max |x| * 2^-23 and a little. One digit: of groups max |x| /
   127, of whole rows of 8-bit weights max |x| / 127.5, clamped, as quantize_tokens has it. */
static void prepare_integers(struct work *k) {
    const int64_t plane = (int64_t)k->block * k->padded;
    const float top = k->digits == DIGITS ? 8355000.0f : k->bits == 8 ? 127.5f : 127.0f; /* below 127 in each digit */
    float *x = k->x;
    for (int m = 0; m < k->block; m++) {
        load_token(k, k->first + m, x);
        for (int64_t n = 0; n < k->count; n++) {
            int64_t from = k->pieces[n].from, to = k->pieces[n].to, total = 0, where = m * k->count + n;
            int whole_row = k->digits == 1 && k->bits == 8;
            float largest = whole_row ? largest_of(x, k->padded) : largest_of(x + from, to - from);
            int8_t *q = k->xq + m * k->padded;
            float step = largest / top;
            if (step == 0.0f) step = 1.1920929e-7f;
            else if (step < 1.2e-38f && k->digits == DIGITS) step = 1.2e-38f; /* its inverse is finite */
            k->steps[where] = step; /* NaN times anything is NaN */
            if (step != step) {
                for (int d = 0; d < k->digits; d++) memset(q + d * plane + from, 0, to - from);
            } else if (k->digits == 1) {
                for (int64_t i = from; i < to; i++) {
                    float r = rintf(x[i] / step);
                    q[i] = (int8_t)(r > 127.0f ? 127.0f : r < -128.0f ? -128.0f : r); /* a subnormal step is coarse */
                    total += q[i];
                }
            } else {
                float inverse = 1.0f / step;
                int32_t sum = 0;
                for (int64_t i = from; i < to; i++) {
                    int32_t r = (int32_t)rintf(x[i] * inverse);
                    int32_t low = (int8_t)r, rest = (r - low) >> 8, middle = (int8_t)rest;
                    q[i] = (int8_t)low;
                    q[plane + i] = (int8_t)middle;
                    q[2 * plane + i] = (int8_t)((rest - middle) >> 8);
                    sum += r; /* 256 * 2^23 at most: 2^31 is not reached, since the step is a little larger */
                }
                total = sum;
            }
            k->sums[where] = (float)total;
        }
    }
}

/* ------------------------------------------------------------------------------------------------ threads */

static void worker(void *data) {
    struct work *k = data;
    int64_t share;
    while ((share = __atomic_fetch_add(&k->next, 1, __ATOMIC_RELAXED)) < k->shares)
        for (int64_t t = k->panels * share / k->shares; t < k->panels * (share + 1) / k->shares; t++)
            k->panel(k, k->column / ROWS + t);
}

static void *thread_main(void *data) { worker(data); return NULL; }

static void run(struct work *k) {
    int64_t threads = k->threads < k->panels ? k->threads : k->panels;
    k->next = 0;
    k->shares = threads > 1 ? (k->panels < SHARES * threads ? k->panels : SHARES * threads) : 1;
    if (threads <= 1) worker(k);
    else if (k->w->parallel != NULL) k->w->parallel(worker, k, (unsigned)threads, 0);
    else {
        pthread_t others[64];
        int64_t started = 0;
        while (started < threads - 1 && started < 64 && pthread_create(&others[started], NULL, thread_main, k) == 0) started++;
        worker(k);
        for (int64_t i = 0; i < started; i++) pthread_join(others[i], NULL);
    }
}

/* ------------------------------------------------------------------------------------------------ entry points */

static struct work begin(const struct matrix *w, const void *x, void *y, int64_t threads) {
    const int codes = 32 / (int)w->bits;
    struct work k = {.w = w, .in = x, .y = y, .threads = threads, .bits = (int)w->bits};
    k.padded = (w->in_features + codes - 1) / codes * codes;
    k.groups = (w->in_features + w->group_size - 1) / w->group_size;
    k.panels = (w->out_features + ROWS - 1) / ROWS;
    return k;
}

/* Cut groups into pieces of `longest` at most; returns their count, and writes them unless `pieces` is NULL. */
static int64_t cut(const struct work *k, int64_t longest, struct piece *pieces) {
    int64_t count = 0;
    for (int64_t from = 0, to; from < k->padded; from = to, count++) {
        int64_t group = from / k->w->group_size, end = (group + 1) * k->w->group_size;
        to = from + longest < end ? from + longest : end;
        if (to > k->padded) to = k->padded;
        if (pieces != NULL) pieces[count] = (struct piece){from, to, group};
    }
    return count;
}

/* y [tokens][out_features] = x [tokens][in_features] times w, + bias; 0, or -1 when memory is short. */
int linear(const struct matrix *w, const void *x, void *y, int64_t tokens, int64_t threads) {
    struct work k = begin(w, x, y, threads);
    const int bits = k.bits;
    const int64_t most = tokens < BLOCK ? tokens : BLOCK;
    k.digits = w->integers ? 1 : AS_DIGITS(bits, most) ? DIGITS : 0;
    const int64_t longest = w->integers && bits == 8 ? LONGEST : CHUNK;
    k.count = cut(&k, longest, NULL);
    const int64_t floats = k.digits ? k.padded : most * k.padded, corners = most * k.count;
    char *memory = malloc(k.count * sizeof(struct piece) + 4 * floats + 8 * corners + k.digits * most * k.padded + 64);
    if (memory == NULL) return -1;
    k.pieces = (struct piece *)memory;
    cut(&k, longest, k.pieces);
    k.x = (float *)(k.pieces + k.count);
    k.sums = k.x + floats;
    k.steps = k.sums + corners;
    k.xq = (int8_t *)(k.steps + corners);
    for (k.first = 0; k.first < tokens; k.first += k.block) {
        k.block = tokens - k.first < BLOCK ? (int)(tokens - k.first) : BLOCK;
        if (k.digits) prepare_integers(&k);
        else prepare_floats(&k, k.block <= 4);
        if (k.digits == DIGITS) k.panel = bits == 4 ? digits_panel4 : digits_panel8;
        else if (k.digits) k.panel = bits == 4 ? integer_panel4 : integer_panel8;
        else k.panel = bits == 4 ? float_panel4 : float_panel8;
        run(&k);
    }
    free(memory);
    return 0;
}

/* y [in_features][width] = columns `column` .. + `width` of the transposed weight, of x_type; `column` is a multiple of 16. */
void transposed(const struct matrix *w, void *y, int64_t column, int64_t width, int64_t threads) {
    struct work k = begin(w, NULL, y, threads);
    k.column = column;
    k.width = width;
    k.panels = (width + ROWS - 1) / ROWS;
    k.panel = k.bits == 4 ? transposed_panel4 : transposed_panel8;
    run(&k);
}

/* Whether this processor has all that the flags of this file let the compiler use. The two that compilers do not agree to
   know by name are asked of cpuid: a processor has AVX-VNNI or not whatever else it has. */
#if defined(__x86_64__) && defined(__AVX2__)
INLINE int has_f16c(void) {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
INLINE int has_avx_vnni(void) {
    unsigned a = 0, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif
int supported(void) {
    int all = 1;
#if defined(__AVX2__)
    all = all && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#endif
#if defined(__AVXVNNI__)
    all = all && has_avx_vnni();
#endif
#if defined(__AVX512BW__)
    all = all && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    all = all && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#endif
    return all;
}
