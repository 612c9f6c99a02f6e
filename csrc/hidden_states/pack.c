// SPDX-License-Identifier: Apache-2.0
// Packs rows of several layers side by side, on a CPU, in one pass: the native twin of
// vllm/v1/hidden_states/pack.py, which says what is computed and checks the arguments.
//
// Python's limited API and raw addresses; nothing of torch, so that one build outlives
// its releases. One thread: a step's rows take it a small part of the time in which a
// CPU computes them, and the engine's own threads stay where they are.

// Py_LIMITED_API is CMakeLists.txt's.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

// The best of these for the processor at hand, chosen when the module is loaded. On
// 64-bit ARM every processor has NEON, and the compiler uses it.
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

// The order of pack.py's DTYPES.
enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT8, NUM_DTYPES };
static const int64_t SIZES[NUM_DTYPES] = {4, 2, 2, 1};

// The largest float8_e4m3 value, and the least scale: where all of a row is zero.
#define FLOAT8_MAX 448.0f
#define MIN_SCALE 0x1p-126f

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_float32(float value) { return value; }
static inline float from_bfloat16(uint16_t value) {
    return from_bits((uint32_t)value << 16);
}
static inline float from_float16(_Float16 value) { return (float)value; }

static inline float to_float32(float value) { return value; }
static inline _Float16 to_float16(float value) { return (_Float16)value; }

// Rounds to nearest, ties to even, as all of these do.
static inline uint16_t to_bfloat16(float value) {
    uint32_t bits = bits_of(value);
    uint16_t rounded = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    return value != value ? (uint16_t)0x7FC0 : rounded;
}

// For what is at most FLOAT8_MAX, give or take its rounding, or not a number.
static inline uint8_t to_float8(float value) {
    uint32_t bits = bits_of(value);
    uint32_t sign = bits >> 24 & 0x80;
    uint32_t magnitude = bits & 0x7FFFFFFF;
    // Three bits of mantissa stay of 23, and the exponent's bias is 7, not 127.
    uint32_t normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    // Multiples of 2^-9, which is the last bit of 2^14.
    uint32_t subnormal = bits_of(from_bits(magnitude) + 0x1p14f) - bits_of(0x1p14f);
    uint32_t rounded = magnitude < bits_of(0x1p-6f) ? subnormal : normal;
    return (uint8_t)(sign | (magnitude > 0x7F800000 ? 0x7F : rounded));
}

#define DEFINE_CONVERT(from, from_type, to, to_type)                                   \
    FOR_EACH_PROCESSOR static void from##_to_##to(                                     \
        const void *source, void *target, int64_t size) {                              \
        const from_type *values = source;                                              \
        to_type *converted = target;                                                   \
        for (int64_t i = 0; i < size; i++)                                             \
            converted[i] = to_##to(from_##from(values[i]));                            \
    }

// Bits of floats without their sign are in the order of what they stand for; what is
// not a number is above all.
#define DEFINE_QUANTIZE(from, from_type)                                               \
    FOR_EACH_PROCESSOR static uint32_t max_of_##from(                                  \
        const void *source, int64_t size) {                                            \
        const from_type *values = source;                                              \
        uint32_t max = 0;                                                              \
        for (int64_t i = 0; i < size; i++) {                                           \
            uint32_t bits = bits_of(from_##from(values[i])) & 0x7FFFFFFF;              \
            max = bits > max ? bits : max;                                             \
        }                                                                              \
        return max;                                                                    \
    }                                                                                  \
    FOR_EACH_PROCESSOR static void quantize_##from(                                    \
        const void *source, void *target, int64_t size, float scale) {                 \
        const from_type *values = source;                                              \
        uint8_t *quantized = target;                                                   \
        for (int64_t i = 0; i < size; i++)                                             \
            quantized[i] = to_float8(from_##from(values[i]) / scale);                  \
    }

DEFINE_CONVERT(float32, float, bfloat16, uint16_t)
DEFINE_CONVERT(float32, float, float16, _Float16)
DEFINE_CONVERT(bfloat16, uint16_t, float32, float)
DEFINE_CONVERT(bfloat16, uint16_t, float16, _Float16)
DEFINE_CONVERT(float16, _Float16, float32, float)
DEFINE_CONVERT(float16, _Float16, bfloat16, uint16_t)
DEFINE_QUANTIZE(float32, float)
DEFINE_QUANTIZE(bfloat16, uint16_t)
DEFINE_QUANTIZE(float16, _Float16)

typedef void (*Convert)(const void *, void *, int64_t);
typedef uint32_t (*MaxOf)(const void *, int64_t);
typedef void (*Quantize)(const void *, void *, int64_t, float);

static const Convert CONVERT[FLOAT8][FLOAT8] = {
    {NULL, float32_to_bfloat16, float32_to_float16},
    {bfloat16_to_float32, NULL, bfloat16_to_float16},
    {float16_to_float32, float16_to_bfloat16, NULL},
};
static const MaxOf MAX_OF[FLOAT8] = {max_of_float32, max_of_bfloat16, max_of_float16};
static const Quantize QUANTIZE[FLOAT8] = {
    quantize_float32, quantize_bfloat16, quantize_float16};

typedef struct {
    const int64_t *addresses;  // of the layers
    const int64_t *strides;    // of their rows, in bytes
    int64_t num_layers;
    int64_t hidden_size;
    int from, to;
} Plan;

static void pack_row(const Plan *plan, int64_t row, char *target, float *scale) {
    const int64_t size = plan->hidden_size;
    const int64_t target_size = size * SIZES[plan->to];
    if (plan->to == FLOAT8) {
        uint32_t max = 0;
        for (int64_t layer = 0; layer < plan->num_layers; layer++) {
            const char *source =
                (const char *)plan->addresses[layer] + row * plan->strides[layer];
            uint32_t bits = MAX_OF[plan->from](source, size);
            max = bits > max ? bits : max;
        }
        *scale = from_bits(max) / FLOAT8_MAX;
        *scale = *scale < MIN_SCALE ? MIN_SCALE : *scale;
    }
    for (int64_t layer = 0; layer < plan->num_layers; layer++) {
        const char *source =
            (const char *)plan->addresses[layer] + row * plan->strides[layer];
        if (plan->to == plan->from)
            memcpy(target, source, target_size);
        else if (plan->to == FLOAT8)
            QUANTIZE[plan->from](source, target, size, *scale);
        else
            CONVERT[plan->from][plan->to](source, target, size);
        target += target_size;
    }
}

static PyObject *pack(PyObject *self, PyObject *args) {
    Py_buffer layers, runs;
    long long hidden_size, out, scales;
    int from, to;
    if (!PyArg_ParseTuple(args, "y*y*LiLiL", &layers, &runs, &hidden_size, &from, &out,
                          &to, &scales))
        return NULL;
    const int64_t num_layers = layers.len / (2 * sizeof(int64_t));
    const int64_t num_runs = runs.len / (2 * sizeof(int64_t));
    int is_known = from >= 0 && from < FLOAT8 && to >= 0 && to < NUM_DTYPES &&
                   (to != FLOAT8 || scales != 0);
    if (is_known) {
        Py_BEGIN_ALLOW_THREADS;
        const int64_t *table = layers.buf;
        const Plan plan = {table, table + num_layers, num_layers, hidden_size, from, to};
        const int64_t row_size = num_layers * hidden_size * SIZES[to];
        const int64_t *run = runs.buf;
        char *target = (char *)(intptr_t)out;
        float *scale = (float *)(intptr_t)scales;
        for (int64_t i = 0; i < num_runs; i++, run += 2) {
            for (int64_t row = run[0]; row < run[0] + run[1]; row++) {
                pack_row(&plan, row, target, scale);
                target += row_size;
                scale += to == FLOAT8;
            }
        }
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&layers);
    PyBuffer_Release(&runs);
    if (!is_known) {
        PyErr_SetString(PyExc_ValueError, "no such dtypes, or no scales for them");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"pack", pack, METH_VARARGS,
     "pack(layers, runs, hidden_size, from_dtype, out, to_dtype, scales)\n\n"
     "layers: int64 [2, L], addresses and bytes from row to row. runs: int64 [R, 2],\n"
     "first rows and numbers of rows. out, scales: addresses."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "_pack", .m_size = 0, .m_methods = METHODS};

PyMODINIT_FUNC PyInit__pack(void) { return PyModuleDef_Init(&MODULE); }
