/* Goes through indices, and notes in the pulse which of them is at hand and since when: two plain stores before each.

In Python that is five operations for each sample; with samples that are at hand at once, three percent of a worker's
time.

Optional: without a compiler Python does the same, see local/pulse.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <time.h>

typedef struct {
    PyObject_HEAD
    PyObject *indices; /* an iterator */
    Py_buffer page;    /* keeps the memory of these two */
    volatile int64_t *position, *since;
    int64_t next;
} Noted;

static PyObject *noted_next(Noted *self) {
    PyObject *index = PyIter_Next(self->indices);
    if (index != NULL) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC_COARSE, &now); /* some milliseconds ago; the exact time takes 40 ns */
        *self->position = self->next++;
        *self->since = now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
    }
    return index;
}

static void noted_dealloc(Noted *self) {
    PyBuffer_Release(&self->page);
    Py_XDECREF(self->indices);
    PyObject_Free(self);
}

static PyTypeObject noted_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "holdfast.local._pulse.Noted",
    .tp_basicsize = sizeof(Noted),
    .tp_dealloc = (destructor)noted_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)noted_next,
};

/* noted(words, position, since, first, indices): `words` is memory of 64-bit words, `position` and `since` are the
   numbers of two of them, `first` is the position of the first index. */
static PyObject *noted(PyObject *module, PyObject *args) {
    PyObject *words, *indices;
    Py_ssize_t position, since;
    long long first;
    if (!PyArg_ParseTuple(args, "OnnLO", &words, &position, &since, &first, &indices)) return NULL;
    Noted *made = PyObject_New(Noted, &noted_type);
    if (made == NULL) return NULL;
    made->indices = NULL;
    made->page.obj = NULL; /* nothing to release yet */
    if (PyObject_GetBuffer(words, &made->page, PyBUF_WRITABLE) < 0) goto failed;
    if (position < 0 || since < 0 || made->page.len / 8 <= position || made->page.len / 8 <= since) {
        PyErr_SetString(PyExc_IndexError, "there is no such word");
        goto failed;
    }
    made->position = (int64_t *)made->page.buf + position;
    made->since = (int64_t *)made->page.buf + since;
    made->next = first;
    made->indices = PyObject_GetIter(indices);
    if (made->indices == NULL) goto failed;
    return (PyObject *)made;
failed:
    Py_DECREF(made);
    return NULL;
}

static PyMethodDef methods[] = {
    {"noted", noted, METH_VARARGS, "noted(words, position, since, first, indices): see above it."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pulse", NULL, -1, methods};

PyMODINIT_FUNC PyInit__pulse(void) {
    if (PyType_Ready(&noted_type) < 0) return NULL;
    return PyModule_Create(&module);
}
