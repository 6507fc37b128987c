// The event queue of a loop on virtual time, as types of CPython's own making: a handle is made and called some twenty times
// for each simulated request, and wrapped objects of C++ would take as long to make as what they replace.
//
// The oracle is the Python reference in src/penstock/sim/loop.py: equal calls run alike.

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <tuple>
#include <vector>

namespace nb = nanobind;

namespace penstock {
namespace {

constexpr std::size_t kCancelledMax = 100;

struct EventQueue;

// What is to be called, with its context before it and its arguments after it, as a call of `Context.run` wants them.
struct Handle {
    PyObject_VAR_HEAD
    double when_s;
    EventQueue* timer_of; // while it waits for its moment; whoever that is keeps it
    Py_ssize_t num_parts;
    bool is_over; // cancelled, or called
    PyObject* parts[1];

    void clear() {
        for (Py_ssize_t i = 0; i < num_parts; ++i) {
            Py_CLEAR(parts[i]);
        }
    }
};

struct Timer {
    double when_s;
    std::uint64_t number; // those of one moment run in the order in which they were set
    Handle* handle;

    bool operator>(const Timer& other) const {
        return std::tie(when_s, number) > std::tie(other.when_s, other.number);
    }
};

struct State {
    double now_s = 0.0;
    bool is_stopping = false;
    std::uint64_t next_number = 0;
    std::size_t cancelled = 0; // timers that are still kept
    std::deque<Handle*> ready;
    std::vector<Timer> timers; // a heap, the first at its top
};

struct EventQueue {
    PyObject_HEAD
    State* state;
};

PyTypeObject* handle_type = nullptr;
PyObject* copy_context = nullptr;
PyObject* name_run = nullptr;
PyObject* name_stuck = nullptr;
PyObject* name_failed = nullptr;

PyObject* as_object(Handle* handle) { return reinterpret_cast<PyObject*>(handle); }
Handle* as_handle(PyObject* self) { return reinterpret_cast<Handle*>(self); }
State& state_of(PyObject* self) { return *reinterpret_cast<EventQueue*>(self)->state; }

void release(Handle* handle) { Py_DECREF(as_object(handle)); }

void free_instance(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(reinterpret_cast<PyObject*>(type));
}

// ---- Handles

// Forget what would have been called, and once they are many, all timers that were cancelled.
PyObject* handle_cancel(PyObject* self, PyObject*) {
    Handle* handle = as_handle(self);
    if (!handle->is_over) {
        handle->is_over = true;
        if (handle->timer_of != nullptr) {
            State& state = *handle->timer_of->state;
            if (++state.cancelled > kCancelledMax && 2 * state.cancelled > state.timers.size()) {
                std::vector<Handle*> gone;
                std::erase_if(state.timers, [&](const Timer& timer) {
                    if (timer.handle->is_over) {
                        timer.handle->timer_of = nullptr;
                        gone.push_back(timer.handle);
                    }
                    return timer.handle->timer_of == nullptr;
                });
                std::ranges::make_heap(state.timers, std::greater{});
                state.cancelled = 0;
                handle->clear();
                std::ranges::for_each(gone, release); // last: what goes with them may call back
                Py_RETURN_NONE;
            }
        }
        handle->clear();
    }
    Py_RETURN_NONE;
}

PyObject* handle_cancelled(PyObject* self, PyObject*) { return PyBool_FromLong(as_handle(self)->is_over); }

PyObject* handle_when(PyObject* self, PyObject*) { return PyFloat_FromDouble(as_handle(self)->when_s); }

int handle_traverse(PyObject* self, visitproc visit, void* arg) {
    Handle* handle = as_handle(self);
    for (Py_ssize_t i = 0; i < handle->num_parts; ++i) {
        Py_VISIT(handle->parts[i]);
    }
    Py_VISIT(reinterpret_cast<PyObject*>(Py_TYPE(self)));
    return 0;
}

int handle_clear(PyObject* self) {
    as_handle(self)->clear();
    return 0;
}

void handle_dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    as_handle(self)->clear();
    free_instance(self);
}

// Make a handle of (callback, *args) and perhaps `context=`; null with an error set.
Handle* make_handle(double when_s, PyObject* const* args, Py_ssize_t num_args, PyObject* names) {
    PyObject* context = Py_None;
    const Py_ssize_t num_names = names == nullptr ? 0 : PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < num_names; ++i) {
        if (PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, i), "context") != 0) {
            PyErr_SetString(PyExc_TypeError, "a call may be given a context, and nothing else by name");
            return nullptr;
        }
        context = args[num_args + i];
    }
    if (num_args < 1) {
        PyErr_SetString(PyExc_TypeError, "a call needs something to call");
        return nullptr;
    }
    if (context == Py_None) {
        context = PyObject_CallNoArgs(copy_context);
        if (context == nullptr) {
            return nullptr;
        }
    } else {
        Py_INCREF(context);
    }
    Handle* handle = PyObject_GC_NewVar(Handle, handle_type, num_args);
    if (handle == nullptr) {
        Py_DECREF(context);
        return nullptr;
    }
    handle->when_s = when_s;
    handle->timer_of = nullptr;
    handle->num_parts = num_args + 1;
    handle->is_over = false;
    handle->parts[0] = context;
    for (Py_ssize_t i = 0; i < num_args; ++i) {
        Py_INCREF(args[i]);
        handle->parts[i + 1] = args[i];
    }
    PyObject_GC_Track(as_object(handle));
    return handle;
}

// ---- EventQueue

PyObject* queue_time(PyObject* self, PyObject*) { return PyFloat_FromDouble(state_of(self).now_s); }

PyObject* queue_call_soon(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* names) {
    Handle* handle = make_handle(0.0, args, num_args, names);
    if (handle != nullptr) {
        Py_INCREF(as_object(handle));
        state_of(self).ready.push_back(handle);
    }
    return as_object(handle);
}

PyObject* call_at(PyObject* self, double from_s, PyObject* const* args, Py_ssize_t num_args, PyObject* names) {
    if (num_args < 2) {
        PyErr_SetString(PyExc_TypeError, "a timer needs a moment and something to call");
        return nullptr;
    }
    const double when_s = from_s + PyFloat_AsDouble(args[0]);
    if (PyErr_Occurred() != nullptr) {
        return nullptr;
    }
    Handle* handle = make_handle(when_s, args + 1, num_args - 1, names);
    if (handle != nullptr) {
        State& state = state_of(self);
        Py_INCREF(as_object(handle));
        handle->timer_of = reinterpret_cast<EventQueue*>(self);
        state.timers.push_back({when_s, state.next_number++, handle});
        std::ranges::push_heap(state.timers, std::greater{});
    }
    return as_object(handle);
}

PyObject* queue_call_at(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* names) {
    return call_at(self, 0.0, args, num_args, names);
}

PyObject* queue_call_later(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* names) {
    return call_at(self, state_of(self).now_s, args, num_args, names);
}

// Make ready what is due, which is the next timer's moment where nothing is ready; there is one of the two.
void become_due(State& state) {
    if (state.ready.empty()) {
        state.now_s = std::max(state.now_s, state.timers.front().when_s);
    }
    while (!state.timers.empty() && state.timers.front().when_s <= state.now_s) {
        std::ranges::pop_heap(state.timers, std::greater{});
        Handle* handle = state.timers.back().handle;
        state.timers.pop_back();
        handle->timer_of = nullptr;
        if (handle->is_over) {
            --state.cancelled;
            release(handle); // it holds nothing any more
        } else {
            state.ready.push_back(handle);
        }
    }
}

// Hand an error to `_failed`, as nobody called who could catch it; gives whether to go on.
bool tell_error(PyObject* self, PyObject* callback) {
    if (PyErr_ExceptionMatches(PyExc_SystemExit) || PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        return false;
    }
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != nullptr) {
        PyException_SetTraceback(error, trace);
    }
    PyObject* answer = PyObject_CallMethodObjArgs(self, name_failed, callback, error, nullptr);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    Py_XDECREF(answer);
    return answer != nullptr;
}

PyObject* queue_run_iterations(PyObject* self, PyObject*) {
    State& state = state_of(self);
    do {
        if (state.ready.empty() && state.timers.empty()) {
            return PyObject_CallMethodObjArgs(self, name_stuck, nullptr);
        }
        become_due(state);
        // What they make ready runs in the next iteration; and they may forget all of it.
        for (std::size_t left = state.ready.size(); left > 0 && !state.ready.empty(); --left) {
            Handle* handle = state.ready.front();
            state.ready.pop_front();
            bool goes_on = true;
            if (!handle->is_over) {
                handle->is_over = true;
                PyObject* answer = PyObject_VectorcallMethod(name_run, handle->parts,
                                                             static_cast<std::size_t>(handle->num_parts), nullptr);
                Py_XDECREF(answer);
                goes_on = answer != nullptr || tell_error(self, handle->parts[1]);
                handle->clear();
            }
            release(handle);
            if (!goes_on) {
                return nullptr;
            }
        }
    } while (!state.is_stopping);
    state.is_stopping = false;
    Py_RETURN_NONE;
}

PyObject* queue_stop_iterations(PyObject* self, PyObject*) {
    state_of(self).is_stopping = true;
    Py_RETURN_NONE;
}

void forget(State& state) {
    std::deque<Handle*> ready;
    std::vector<Timer> timers;
    ready.swap(state.ready);
    timers.swap(state.timers);
    state.cancelled = 0;
    for (const Timer& timer : timers) {
        timer.handle->timer_of = nullptr;
    }
    std::ranges::for_each(ready, release);
    std::ranges::for_each(timers, release, &Timer::handle);
}

PyObject* queue_forget_calls(PyObject* self, PyObject*) {
    forget(state_of(self));
    Py_RETURN_NONE;
}

PyObject* queue_num_timers(PyObject* self, void*) { return PyLong_FromSize_t(state_of(self).timers.size()); }

PyObject* queue_cancelled_timers(PyObject* self, void*) { return PyLong_FromSize_t(state_of(self).cancelled); }

PyObject* queue_new(PyTypeObject* type, PyObject*, PyObject*) {
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != nullptr) {
        reinterpret_cast<EventQueue*>(self)->state = new State;
    }
    return self;
}

int queue_traverse(PyObject* self, visitproc visit, void* arg) {
    State* state = reinterpret_cast<EventQueue*>(self)->state;
    if (state != nullptr) { // else it is just being made
        for (Handle* handle : state->ready) {
            Py_VISIT(as_object(handle));
        }
        for (const Timer& timer : state->timers) {
            Py_VISIT(as_object(timer.handle));
        }
    }
    Py_VISIT(reinterpret_cast<PyObject*>(Py_TYPE(self)));
    return 0;
}

int queue_clear(PyObject* self) {
    forget(state_of(self));
    return 0;
}

void queue_dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    forget(state_of(self));
    delete reinterpret_cast<EventQueue*>(self)->state;
    free_instance(self);
}

// ---- Types

template <class Function>
PyCFunction as_method(Function* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

template <class Function>
void* as_slot(Function* function) {
    return reinterpret_cast<void*>(function);
}

PyMethodDef handle_methods[] = {
    {"cancel", handle_cancel, METH_NOARGS, nullptr},
    {"cancelled", handle_cancelled, METH_NOARGS, nullptr},
    {"when", handle_when, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot handle_slots[] = {
    {Py_tp_traverse, as_slot(handle_traverse)},
    {Py_tp_clear, as_slot(handle_clear)},
    {Py_tp_dealloc, as_slot(handle_dealloc)},
    {Py_tp_methods, handle_methods},
    {0, nullptr},
};

PyType_Spec handle_spec = {
    .name = "penstock._native.Handle",
    .basicsize = sizeof(Handle),
    .itemsize = sizeof(PyObject*),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = handle_slots,
};

constexpr int kCall = METH_FASTCALL | METH_KEYWORDS;

PyMethodDef queue_methods[] = {
    {"time", queue_time, METH_NOARGS, nullptr},
    {"call_soon", as_method(queue_call_soon), kCall, nullptr},
    {"call_at", as_method(queue_call_at), kCall, nullptr},
    {"call_later", as_method(queue_call_later), kCall, nullptr},
    {"run_iterations", queue_run_iterations, METH_NOARGS, nullptr},
    {"stop_iterations", queue_stop_iterations, METH_NOARGS, nullptr},
    {"forget_calls", queue_forget_calls, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef queue_properties[] = {
    {"num_timers", queue_num_timers, nullptr, nullptr, nullptr},
    {"cancelled_timers", queue_cancelled_timers, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot queue_slots[] = {
    {Py_tp_new, as_slot(queue_new)},
    {Py_tp_traverse, as_slot(queue_traverse)},
    {Py_tp_clear, as_slot(queue_clear)},
    {Py_tp_dealloc, as_slot(queue_dealloc)},
    {Py_tp_methods, queue_methods},
    {Py_tp_getset, queue_properties},
    {0, nullptr},
};

PyType_Spec queue_spec = {
    .name = "penstock._native.EventQueue",
    .basicsize = sizeof(EventQueue),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = queue_slots,
};

PyObject* interned(const char* text) { return nb::steal(PyUnicode_InternFromString(text)).release().ptr(); }

nb::object make_type(PyType_Spec& spec) {
    nb::object type = nb::steal(PyType_FromSpec(&spec));
    if (!type.is_valid()) {
        throw nb::python_error();
    }
    return type;
}

}  // namespace

void bind_event_queue(nb::module_& module);

void bind_event_queue(nb::module_& module) {
    copy_context = nb::object(nb::module_::import_("contextvars").attr("copy_context")).release().ptr();
    name_run = interned("run");
    name_stuck = interned("_stuck");
    name_failed = interned("_failed");
    handle_type = reinterpret_cast<PyTypeObject*>(make_type(handle_spec).release().ptr());
    module.attr("EventQueue") = make_type(queue_spec);
}

}  // namespace penstock
