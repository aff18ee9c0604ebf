/* The hot stores of the pulse: which stage a worker is in, and which sample it is at, each with the time, and its index.

In Python that is eight operations for each sample and seven for each stage; with samples that are at hand at once, three
percent of a worker's time.

Optional: without a compiler Python does the same, see local/protocol/pulse.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct {
    PyObject_HEAD
    Py_buffer page; /* keeps the memory of these three */
    volatile int64_t *stage, *position, *since, *index, *kind;
    char *text;
} Recorder;

/* As in local/protocol/pulse.py. */
enum { NO_INDEX, NUMBER, TEXT };
#define TEXT_BYTES 64
#define MOST_PARTS 8

typedef struct {
    PyObject_HEAD
    PyObject *indices; /* an iterator */
    Recorder *to;
    int64_t next;
} Walk;

static int64_t time_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static int is_atom(PyObject *value) {
    if (PyUnicode_CheckExact(value)) return PyUnicode_GET_LENGTH(value) <= TEXT_BYTES;
    if (PyBytes_CheckExact(value)) return PyBytes_GET_SIZE(value) <= TEXT_BYTES;
    return PyLong_CheckExact(value) || PyFloat_CheckExact(value) || PyBool_Check(value) || value == Py_None;
}

/* Its repr is short, and no code of the user's. */
static int is_plain(PyObject *index) {
    if (!PyTuple_CheckExact(index) && !PyList_CheckExact(index)) return is_atom(index);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(index);
    for (Py_ssize_t i = 0; count <= MOST_PARTS && i < count; i++)
        if (!is_atom(PySequence_Fast_GET_ITEM(index, i))) return 0;
    return count <= MOST_PARTS;
}

static void note_text(Recorder *to, PyObject *index) {
    const char *name = strrchr(Py_TYPE(index)->tp_name, '.');
    PyObject *text = is_plain(index) ? PyObject_Repr(index)
                                     : PyUnicode_FromFormat("<%s>", name ? name + 1 : Py_TYPE(index)->tp_name);
    PyObject *bytes = text == NULL ? NULL : PyUnicode_AsEncodedString(text, "utf-8", "replace");
    if (bytes != NULL) {
        Py_ssize_t size = PyBytes_GET_SIZE(bytes);
        memset(to->text, 0, TEXT_BYTES);
        memcpy(to->text, PyBytes_AS_STRING(bytes), size < TEXT_BYTES ? size : TEXT_BYTES);
        *to->kind = TEXT;
    } else {
        PyErr_Clear(); /* it is not named, and nothing else fails */
    }
    Py_XDECREF(bytes);
    Py_XDECREF(text);
}

static void note_index(Recorder *to, PyObject *index) {
    *to->kind = NO_INDEX;
    if (PyLong_CheckExact(index)) {
        int overflow;
        int64_t value = PyLong_AsLongLongAndOverflow(index, &overflow);
        if (!overflow) {
            *to->index = value, *to->kind = NUMBER;
            return;
        }
    } else if (PyIndex_Check(index)) {
        PyObject *number = PyNumber_Index(index); /* numpy's, torch's */
        if (number != NULL) {
            int overflow;
            int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow);
            Py_DECREF(number);
            if (!overflow) {
                *to->index = value, *to->kind = NUMBER;
                return;
            }
        }
        PyErr_Clear(); /* user code, or an array: its type is written */
    }
    note_text(to, index);
}

static PyObject *walk_next(Walk *self) {
    PyObject *index = PyIter_Next(self->indices);
    if (index != NULL) {
        *self->to->position = self->next++;
        *self->to->since = time_of(CLOCK_MONOTONIC_COARSE); /* some milliseconds ago; the exact time takes 40 ns */
        note_index(self->to, index);
    }
    return index;
}

static void walk_dealloc(Walk *self) {
    Py_DECREF(self->to);
    Py_DECREF(self->indices);
    PyObject_Free(self);
}

static PyTypeObject walk_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "holdfast.local.protocol._pulse.Walk",
    .tp_basicsize = sizeof(Walk),
    .tp_dealloc = (destructor)walk_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)walk_next,
};

/* walk(stage, indices) */
static PyObject *recorder_walk(Recorder *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "walk(stage, indices)");
        return NULL;
    }
    int64_t stage = PyLong_AsLongLong(args[0]);
    if (stage == -1 && PyErr_Occurred()) return NULL;
    PyObject *indices = PyObject_GetIter(args[1]);
    if (indices == NULL) return NULL;
    Walk *walk = PyObject_New(Walk, &walk_type);
    if (walk == NULL) {
        Py_DECREF(indices);
        return NULL;
    }
    walk->indices = indices;
    walk->to = (Recorder *)Py_NewRef((PyObject *)self);
    walk->next = 0;
    *self->stage = stage;
    return (PyObject *)walk;
}

/* enter(stage, position=0) */
static PyObject *recorder_enter(Recorder *self, PyObject *const *args, Py_ssize_t count) {
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "enter(stage, position=0)");
        return NULL;
    }
    int64_t stage = PyLong_AsLongLong(args[0]);
    if (stage == -1 && PyErr_Occurred()) return NULL;
    int64_t position = count == 2 ? PyLong_AsLongLong(args[1]) : 0;
    if (position == -1 && PyErr_Occurred()) return NULL;
    *self->stage = stage;
    *self->position = position;
    *self->since = time_of(CLOCK_MONOTONIC);
    Py_RETURN_NONE;
}

/* Recorder(words, stage, position, since, index, kind, text): `words` is memory of 64-bit words; the others are numbers
of words, `text` the first of eight. */
static PyObject *recorder_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *words;
    Py_ssize_t at[6], last = -1;
    if (named != NULL && PyDict_GET_SIZE(named)) {
        PyErr_SetString(PyExc_TypeError, "Recorder(words, stage, position, since, index, kind, text), by position");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "Onnnnnn", &words, at, at + 1, at + 2, at + 3, at + 4, at + 5)) return NULL;
    Recorder *made = (Recorder *)type->tp_alloc(type, 0);
    if (made == NULL || PyObject_GetBuffer(words, &made->page, PyBUF_WRITABLE) < 0) goto failed;
    for (int i = 0; i < 6; i++) {
        if (at[i] < 0) last = PY_SSIZE_T_MAX - TEXT_BYTES;
        Py_ssize_t end = at[i] + (i == 5 ? TEXT_BYTES / 8 - 1 : 0);
        last = last > end ? last : end;
    }
    if (made->page.len / 8 <= last) {
        PyErr_SetString(PyExc_IndexError, "there is no such word");
        goto failed;
    }
    int64_t *first = made->page.buf;
    made->stage = first + at[0], made->position = first + at[1], made->since = first + at[2];
    made->index = first + at[3], made->kind = first + at[4], made->text = (char *)(first + at[5]);
    return (PyObject *)made;
failed:
    Py_XDECREF(made);
    return NULL;
}

static void recorder_dealloc(Recorder *self) {
    PyBuffer_Release(&self->page);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef recorder_methods[] = {
    {"walk", (PyCFunction)(void (*)(void))recorder_walk, METH_FASTCALL, "walk(stage, indices): see above it."},
    {"enter", (PyCFunction)(void (*)(void))recorder_enter, METH_FASTCALL, "enter(stage, position=0): see above it."},
    {NULL, NULL, 0, NULL},
};
static PyTypeObject recorder_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "holdfast.local.protocol._pulse.Recorder",
    .tp_basicsize = sizeof(Recorder),
    .tp_new = recorder_new,
    .tp_dealloc = (destructor)recorder_dealloc,
    .tp_methods = recorder_methods,
    .tp_flags = Py_TPFLAGS_DEFAULT,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pulse", NULL, -1, NULL};

PyMODINIT_FUNC PyInit__pulse(void) {
    if (PyType_Ready(&walk_type) < 0 || PyType_Ready(&recorder_type) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddObjectRef(made, "Recorder", (PyObject *)&recorder_type) < 0) Py_CLEAR(made);
    return made;
}
