//go:build pkcs11

package pkcs11

import (
	"fmt"
	"sync"

	p11 "github.com/miekg/pkcs11"
)

// module is a PKCS#11 library in this process. The library is initialised once,
// however many KMSs use it, and is never unloaded.
type module struct {
	ctx *p11.Ctx
	// changing is held by the one call in this process that changes a root.
	changing chan struct{}

	// writes is held by a call of the library that writes to a token, and
	// read-held by every other: what is being written, some tokens do not find,
	// or fail over.
	writes sync.RWMutex

	// calls is read-held by whoever is inside the library. Whoever finalises
	// the library takes it whole, and only if nobody is inside.
	calls sync.RWMutex
	gen   int // counts initialisations; guarded by calls

	refs int // guarded by modules
}

var modules = struct {
	sync.Mutex
	byPath map[string]*module
}{byPath: map[string]*module{}}

// loadModule loads and initialises a library, or counts one more use of it.
func loadModule(path string) (*module, error) {
	modules.Lock()
	defer modules.Unlock()
	m := modules.byPath[path]
	if m == nil {
		ctx := p11.New(path)
		if ctx == nil {
			return nil, fmt.Errorf("PKCS#11: %w: %s", ErrModule, path)
		}
		m = &module{ctx: ctx, changing: make(chan struct{}, 1)}
		modules.byPath[path] = m
	}
	if m.refs == 0 {
		if !m.calls.TryLock() {
			return nil, unavailable(fmt.Errorf("a call that began before hangs in %s", path))
		}
		err := m.initialise()
		m.calls.Unlock()
		if err != nil {
			return nil, err
		}
	}
	m.refs++
	return m, nil
}

// unload gives up one use of the library. The last one finalises it, unless a
// call is still inside.
func (m *module) unload() error {
	modules.Lock()
	defer modules.Unlock()
	if m.refs--; m.refs > 0 || !m.calls.TryLock() {
		return nil
	}
	defer m.calls.Unlock()
	if err := m.ctx.Finalize(); err != nil {
		return answered("C_Finalize", err)
	}
	return nil
}

// initialise calls C_Initialize. The caller holds calls.
func (m *module) initialise() error {
	if err := m.ctx.Initialize(); err != nil && code(err) != p11.CKR_CRYPTOKI_ALREADY_INITIALIZED {
		return answered("C_Initialize", err)
	}
	m.gen++
	return nil
}

// reinitialise starts the library anew, unless somebody did so after
// generation gen or a call is inside it: libraries look for their tokens when
// they begin, and many find one that was away only then.
func (m *module) reinitialise(gen int) error {
	if !m.calls.TryLock() {
		return nil
	}
	defer m.calls.Unlock()
	if m.gen != gen {
		return nil
	}
	// What it answers is of no interest: the next call tells.
	_ = m.ctx.Finalize()
	return m.initialise()
}
