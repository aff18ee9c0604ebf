/* Copies samples side by side into a slot; large batches with stores that go past the cache.

A large batch does not fit the cache, so an ordinary copy first reads every line it is about to overwrite, and throws
out what trainer and worker were using. Measured with two workers on two cores, 38 MB batches: 5.9 ms by memcpy, 2.4 ms
this way.

Optional: without a compiler the package installs and works without this module, see shm/slot_writer.py. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

static void copy(char *to, const char *from, size_t size) {
    size_t head = (size_t)(-(uintptr_t)to & 15);
    if (head > size) head = size;
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= 64; to += 64, from += 64, size -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    memcpy(to, from, size);
}

/* Such stores are not ordered with others: the batch must be whole before it is announced. */
static void settle(void) { _mm_sfence(); }
#else
static void copy(char *to, const char *from, size_t size) { memcpy(to, from, size); }
static void settle(void) {}
#endif

/* Samples of `size` bytes side by side, in pieces: whoever has time for the next one takes it. */
typedef struct {
    char *to, **from;
    size_t size, each, pieces, next;
} Work;

enum { PIECE = 256 << 10 };

static void *copy_pieces(void *of) {
    Work *work = of;
    size_t piece;
    while ((piece = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->pieces) {
        size_t sample = piece / work->each, start = piece % work->each * PIECE;
        size_t size = work->size - start < PIECE ? work->size - start : PIECE;
        copy(work->to + sample * work->size + start, work->from[sample] + start, size);
    }
    settle();
    return NULL;
}

static const int crashes[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};

/* A second thread for it, on another processor than ours. Signals stay the main thread's, but for those that a thread
   brings on itself: a sample may lie in a file that was cut short. False when there is no room for a thread, or no other
   processor. */
static int find_help(Work *work, pthread_t *helper) {
    cpu_set_t others;
    int here = sched_getcpu();
    if (here < 0 || sched_getaffinity(0, sizeof others, &others) < 0) return 0;
    CPU_CLR(here, &others);
    if (CPU_COUNT(&others) == 0) return 0;
    pthread_attr_t small;
    sigset_t all, before;
    if (pthread_attr_init(&small) != 0) return 0;
    pthread_attr_setstacksize(&small, 256 << 10);
    pthread_attr_setaffinity_np(&small, sizeof others, &others);
    sigfillset(&all);
    for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++) sigdelset(&all, crashes[i]);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int found = pthread_create(helper, &small, copy_pieces, work) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&small);
    return found;
}

static void copy_past(char *to, char **from, size_t count, size_t size, int by_two) {
    size_t each = (size + PIECE - 1) / PIECE;
    Work work = {to, from, size, each, each * count, 0};
    pthread_t helper;
    int helped = by_two && find_help(&work, &helper);
    copy_pieces(&work);
    if (helped) pthread_join(helper, NULL);
}

/* copy_all(to, size, sources, by_two): `size` bytes of each of the list `sources`, one after the other, to the address
   `to`. A source is an object with a buffer of that size, or the address of something that the caller knows to be
   there. */
static PyObject *copy_all(PyObject *module, PyObject *args) {
    Py_ssize_t to, size;
    int by_two;
    PyObject *sources;
    if (!PyArg_ParseTuple(args, "nnO!p", &to, &size, &PyList_Type, &sources, &by_two)) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(sources), taken = 0;
    Py_buffer *buffers = PyMem_New(Py_buffer, count);
    char **from = PyMem_New(char *, count);
    if (buffers == NULL || from == NULL) {
        PyMem_Free(buffers);
        PyMem_Free(from);
        return PyErr_NoMemory();
    }
    for (; taken < count; taken++) {
        PyObject *source = PyList_GET_ITEM(sources, taken);
        Py_buffer *buffer = &buffers[taken];
        if (PyLong_Check(source)) {
            buffer->obj = NULL; /* nothing to release */
            buffer->len = size;
            buffer->buf = PyLong_AsVoidPtr(source);
            if (buffer->buf == NULL) {
                if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a source has no memory");
                break;
            }
        } else if (PyObject_GetBuffer(source, buffer, PyBUF_SIMPLE) < 0) {
            break;
        } else if (buffer->len != size) {
            PyBuffer_Release(buffer);
            PyErr_SetString(PyExc_RuntimeError, "a source has another size");
            break;
        }
        from[taken] = buffer->buf;
    }
    if (taken == count) {
        Py_BEGIN_ALLOW_THREADS;
        copy_past((char *)to, from, (size_t)count, (size_t)size, by_two);
        Py_END_ALLOW_THREADS;
    }
    for (Py_ssize_t i = 0; i < taken; i++) PyBuffer_Release(&buffers[i]);
    PyMem_Free(buffers);
    PyMem_Free(from);
    if (taken < count) return NULL;
    Py_RETURN_NONE;
}

/* Tensors ------------------------------------------------------------------------------------------------------------

Python takes half a microsecond to ask a tensor what it is; DLPack's table of functions a twentieth of that. What is
declared here is that table, as far as it is used (https://dmlc.github.io/dlpack/latest/c_api.html), of version 1. */

typedef struct {
    char *data;
    int32_t device, device_number, dimensions;
    uint8_t kind, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Description;

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *export, *import;
    int (*describe)(void *tensor, Description *description); /* valid as long as the tensor is not touched */
    void *stream;
} Exchange;

enum { CPU = 1, COMPLEX = 5 };

static PyTypeObject *tensor_type;
static int (*describe)(void *, Description *);
/* Behind `requires_grad` and `is_neg`. To look them up by name takes longer than to call them. */
static PyGetSetDef *requires_grad;
static PyCFunction is_neg;

/* learn(type): True when tensors of this type can be described. */
static PyObject *learn(PyObject *module, PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    Exchange *exchange = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    PyErr_Clear();
    int known = exchange != NULL && exchange->major == 1 && exchange->describe != NULL && PyType_Check(type);
    PyObject *grad = known ? PyObject_GetAttrString(type, "requires_grad") : NULL;
    PyObject *neg = known ? PyObject_GetAttrString(type, "is_neg") : NULL;
    PyErr_Clear();
    known = grad != NULL && neg != NULL && Py_IS_TYPE(grad, &PyGetSetDescr_Type) &&
            Py_IS_TYPE(neg, &PyMethodDescr_Type) && ((PyMethodDescrObject *)neg)->d_method->ml_flags == METH_NOARGS;
    if (known && tensor_type == NULL) {
        requires_grad = ((PyGetSetDescrObject *)grad)->d_getset;
        is_neg = ((PyMethodDescrObject *)neg)->d_method->ml_meth;
        Py_INCREF(type);
        tensor_type = (PyTypeObject *)type;
        describe = exchange->describe;
    }
    Py_XDECREF(grad);
    Py_XDECREF(neg);
    Py_XDECREF(capsule);
    return PyBool_FromLong(known);
}

/* Its elements lie one after the other. */
static int is_dense(const Description *tensor) {
    int64_t stride = 1;
    for (int d = tensor->dimensions - 1; d >= 0; d--) {
        if (tensor->strides != NULL && tensor->shape[d] != 1 && tensor->strides[d] != stride) return 0;
        stride *= tensor->shape[d];
    }
    return 1;
}

/* Where a sample's bytes are, if they are those of a dense tensor like the others, of which nobody wants a gradient, and
   mean what they say: one may be marked as negated. */
static char *bytes_of(PyObject *sample, const Description *whole) {
    Description one;
    if (Py_TYPE(sample) != tensor_type || describe(sample, &one) < 0) return NULL;
    if (one.device != CPU || one.dimensions != whole->dimensions - 1 || !is_dense(&one)) return NULL;
    if (one.kind != whole->kind || one.bits != whole->bits || one.lanes != whole->lanes) return NULL;
    for (int d = 0; d < one.dimensions; d++)
        if (one.shape[d] != whole->shape[d + 1]) return NULL;
    PyObject *wanted = requires_grad->get(sample, requires_grad->closure);
    PyObject *negated = wanted == Py_False ? is_neg(sample, NULL) : NULL;
    Py_XDECREF(wanted); /* True and False live for ever */
    Py_XDECREF(negated);
    return negated == Py_False && one.data != NULL ? one.data + one.offset : NULL;
}

/* stack(out, samples, past): the tensors of the list or tuple side by side into the tensor `out`; past the cache with 1,
   and by two threads with 2. False, and nothing is done, when they are not all alike, or none can be described. */
static PyObject *stack(PyObject *module, PyObject *args) {
    PyObject *out, *samples;
    int past;
    if (!PyArg_ParseTuple(args, "OOi", &out, &samples, &past)) return NULL;
    if (!(PyList_Check(samples) || PyTuple_Check(samples)) || Py_TYPE(out) != tensor_type) Py_RETURN_FALSE;
    Description whole;
    if (describe(out, &whole) < 0) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (whole.device != CPU || whole.dimensions < 1 || !is_dense(&whole)) Py_RETURN_FALSE;
    size_t elements = 1;
    for (int d = 1; d < whole.dimensions; d++) elements *= (size_t)whole.shape[d];
    size_t bits = (size_t)whole.bits * whole.lanes, size = elements * (bits / 8);
    if (whole.kind == COMPLEX || bits % 8) Py_RETURN_FALSE; /* a complex tensor may be marked as conjugated */
    PyObject *held = PySequence_Tuple(samples); /* whatever becomes of the list meanwhile */
    if (held == NULL) return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(held);
    char **from = PyMem_New(char *, count);
    if (from == NULL) {
        Py_DECREF(held);
        return PyErr_NoMemory();
    }
    int fits = count > 0 && whole.shape[0] == count;
    for (Py_ssize_t i = 0; fits && i < count; i++) {
        from[i] = bytes_of(PyTuple_GET_ITEM(held, i), &whole);
        fits = from[i] != NULL;
    }
    PyErr_Clear(); /* of one that cannot be described */
    if (fits) {
        char *to = whole.data + whole.offset;
        Py_BEGIN_ALLOW_THREADS;
        if (past)
            copy_past(to, from, (size_t)count, size, past > 1);
        else
            for (Py_ssize_t i = 0; i < count; i++) memcpy(to + i * size, from[i], size);
        Py_END_ALLOW_THREADS;
    }
    PyMem_Free(from);
    Py_DECREF(held);
    return PyBool_FromLong(fits);
}

/* What a dense tensor is, in so many numbers. 0 where it is none, or has too many dimensions. */
enum { MOST_DIMENSIONS = 16 };

static size_t looks_of(PyObject *tensor, int64_t *looks) {
    Description one;
    if (Py_TYPE(tensor) != tensor_type || describe(tensor, &one) < 0) return 0;
    if (one.dimensions > MOST_DIMENSIONS || !is_dense(&one)) return 0;
    looks[0] = (int64_t)(intptr_t)(one.data + one.offset);
    looks[1] = (int64_t)one.device << 32 | (int64_t)one.kind << 24 | (int64_t)one.bits << 16 | one.lanes;
    memcpy(looks + 2, one.shape, sizeof *looks * (size_t)one.dimensions);
    return sizeof *looks * (size_t)(one.dimensions + 2);
}

/* looks(tensor): for `same`. Tensors must be known, see `learn`. */
static PyObject *looks(PyObject *module, PyObject *tensor) {
    int64_t found[MOST_DIMENSIONS + 2];
    size_t size = looks_of(tensor, found);
    PyErr_Clear();
    return PyBytes_FromStringAndSize((char *)found, (Py_ssize_t)size);
}

/* same(tensor, looks): True when it is dense, of the dtype and shape and over the memory that it had then, and nobody
   wants its gradient. */
static PyObject *same(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t found[MOST_DIMENSIONS + 2];
    if (count != 2 || !PyBytes_Check(args[1])) Py_RETURN_FALSE;
    size_t size = looks_of(args[0], found);
    if (size == 0 || (Py_ssize_t)size != PyBytes_GET_SIZE(args[1]) || memcmp(found, PyBytes_AS_STRING(args[1]), size)) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    PyObject *wanted = requires_grad->get(args[0], requires_grad->closure);
    Py_XDECREF(wanted); /* True and False live for ever */
    PyErr_Clear();
    return PyBool_FromLong(wanted == Py_False);
}

static PyMethodDef methods[] = {
    {"copy_all", copy_all, METH_VARARGS, "copy_all(to, size, sources, by_two): see above it."},
    {"learn", learn, METH_O, "learn(type): see above it."},
    {"looks", looks, METH_O, "looks(tensor): see above it."},
    {"same", (PyCFunction)(void (*)(void))same, METH_FASTCALL, "same(tensor, looks): see above it."},
    {"stack", stack, METH_VARARGS, "stack(out, samples, past): see above it."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_stream", NULL, 0, methods};

PyMODINIT_FUNC PyInit__stream(void) { return PyModuleDef_Init(&module); }
