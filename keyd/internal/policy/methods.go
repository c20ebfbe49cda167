package policy

import (
	"strings"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	keydv1 "lethe/proto/keyd/v1"
)

// scope says for which tenants a caller must have one of a method's roles.
type scope int

const (
	// nowhere: no role is needed, only a certificate that verifies.
	nowhere scope = iota
	// ofTenants: for every tenant that the request names.
	ofTenants
	// ofDeployment: for all tenants, those to come too, whatever the request names.
	ofDeployment
	// ofAny: for any tenant, whichever it is. Where the request has queries each
	// is judged apart, by Call.Query.
	ofAny
)

// rule says who may call a method: who has any one of these roles.
type rule struct {
	method string // its name without its service
	scope  scope
	roles  roles
}

// readers may see what is recorded about a tenant's subjects.
const readers = eraser | holder | releaser | auditor

// rules is the one table of who may do what. What is not in it nobody may.
var rules = table(map[string]rule{
	keydv1.KeyService_GetBlobKeys_FullMethodName:      {scope: ofAny, roles: sealer | opener},
	keydv1.KeyService_WatchRevocations_FullMethodName: {scope: ofTenants, roles: sealer | opener | auditor},

	keydv1.ErasureService_DestroyKey_FullMethodName:        {scope: ofTenants, roles: eraser},
	keydv1.ErasureService_CancelDestruction_FullMethodName: {scope: ofTenants, roles: eraser},
	keydv1.ErasureService_Reinstate_FullMethodName:         {scope: ofTenants, roles: eraser},
	keydv1.ErasureService_DescribeSubject_FullMethodName:   {scope: ofTenants, roles: readers},
	// The end of everybody in it, and of its name.
	keydv1.ErasureService_DestroyTenant_FullMethodName: {scope: ofDeployment, roles: eraser},

	keydv1.HoldService_PlaceHold_FullMethodName:   {scope: ofTenants, roles: holder},
	keydv1.HoldService_ReleaseHold_FullMethodName: {scope: ofTenants, roles: releaser},
	keydv1.HoldService_ListHolds_FullMethodName:   {scope: ofTenants, roles: readers},

	keydv1.LedgerService_GetReceipt_FullMethodName:   {scope: ofTenants, roles: readers},
	keydv1.LedgerService_ListReceipts_FullMethodName: {scope: ofTenants, roles: readers},
	// What receipts are verified with tells nothing about anybody.
	keydv1.LedgerService_GetLedgerKey_FullMethodName:        {scope: ofAny, roles: readers | admin},
	keydv1.LedgerService_GetCheckpoint_FullMethodName:       {scope: ofDeployment, roles: auditor | admin},
	keydv1.LedgerService_GetConsistencyProof_FullMethodName: {scope: ofDeployment, roles: auditor | admin},

	keydv1.AdminService_CreateTenant_FullMethodName: {scope: ofDeployment, roles: admin},
	keydv1.AdminService_ListTenants_FullMethodName:  {scope: ofDeployment, roles: auditor | admin},
	// A shorter retention kills what is sealed already.
	keydv1.AdminService_PutClass_FullMethodName:         {scope: ofTenants, roles: admin},
	keydv1.AdminService_ListClasses_FullMethodName:      {scope: ofTenants, roles: readers | admin},
	keydv1.AdminService_GetStatus_FullMethodName:        {scope: ofDeployment, roles: auditor | admin},
	keydv1.AdminService_GetEpochs_FullMethodName:        {scope: ofDeployment, roles: auditor | admin},
	keydv1.AdminService_TurnEpoch_FullMethodName:        {scope: ofDeployment, roles: admin},
	keydv1.AdminService_CancelRetirement_FullMethodName: {scope: ofDeployment, roles: admin},
	keydv1.AdminService_ResumeRetirement_FullMethodName: {scope: ofDeployment, roles: admin},
	keydv1.AdminService_ConfirmClock_FullMethodName:     {scope: ofDeployment, roles: admin},
	keydv1.AdminService_Backup_FullMethodName:           {scope: ofDeployment, roles: admin},

	keydv1.AnchorService_GetNewest_FullMethodName: {scope: ofDeployment, roles: anchor},
	keydv1.AnchorService_GetNext_FullMethodName:   {scope: ofDeployment, roles: anchor},
	keydv1.AnchorService_PutObject_FullMethodName: {scope: ofDeployment, roles: anchor},
	keydv1.AnchorService_EnterTerm_FullMethodName: {scope: ofDeployment, roles: anchor},

	healthpb.Health_Check_FullMethodName: {scope: nowhere},
	healthpb.Health_List_FullMethodName:  {scope: nowhere},
	healthpb.Health_Watch_FullMethodName: {scope: nowhere},
})

func table(m map[string]rule) map[string]*rule {
	t := make(map[string]*rule, len(m))
	for name, r := range m {
		r.method = short(name)
		t[name] = &r
	}
	return t
}

// short is a method's name without its service.
func short(method string) string { return method[strings.LastIndexByte(method, '/')+1:] }
