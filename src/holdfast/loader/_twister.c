/* Seeds Python's `random` anew for each batch.

`random.seed` mixes a seed into its 624 words one after another, twice: 5 us, as much as all else a worker does for a
small batch. Here they are the first numbers of another generator, each of which depends on the seed alone.

Optional: without a compiler Python does the same, see loader/seeds.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { WORDS = 624 };

/* As `_random.c` has it. Whoever calls `fill` has seen that it is so. */
typedef struct {
    PyObject_HEAD
    int used;
    uint32_t words[WORDS];
} Twister;

/* fill(random, seed): all words of this generator from the seed (splitmix64). */
static PyObject *fill(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "fill(random, seed)");
        return NULL;
    }
    uint64_t seed = PyLong_AsUnsignedLongLong(args[1]);
    if (seed == (uint64_t)-1 && PyErr_Occurred()) return NULL;
    Twister *twister = (Twister *)args[0];
    for (int i = 0; i < WORDS; i += 2) {
        uint64_t z = seed += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        z ^= z >> 31;
        twister->words[i] = (uint32_t)z;
        twister->words[i + 1] = (uint32_t)(z >> 32);
    }
    twister->used = WORDS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fill", (PyCFunction)(void (*)(void))fill, METH_FASTCALL, "fill(random, seed): see above it."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_twister", NULL, 0, methods};

PyMODINIT_FUNC PyInit__twister(void) { return PyModuleDef_Init(&module); }
